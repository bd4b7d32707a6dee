"""Headers that Serve would act on never reach it; ids are the server's own."""

from __future__ import annotations

import re
from typing import Any

import pytest
from ray.serve._private import constants
from ray.serve._private.http_util import parse_disconnect_disabled_header, validate_http_proxy_callback_return
from ray.serve._private.utils import call_function_from_import_path

from deployments.ids import CLIENT_ID_CHARS_MAX, clean_client_id, new_request_id
from deployments.shield import CLIENT_ID_KEY, IMPORT_PATH, REQUEST_ID_KEY, TAKEN_OFF, UNWATCHED, Shield, shield


def shielded(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    scope: dict[str, Any] = {"type": "http", "headers": list(headers)}
    shield(scope)
    return scope


def test_every_header_serve_acts_on_is_taken_off() -> None:
    known = {
        constants.SERVE_HTTP_REQUEST_ID_HEADER,
        constants.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER,
        constants.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER,
        constants.SERVE_SESSION_ID,
        constants.SERVE_MULTIPLEXED_MODEL_ID,
    }
    assert {name.encode().replace(b"_", b"-") for name in known} <= TAKEN_OFF
    spellings = [name.replace(b"-", b"_", n) for name in sorted(TAKEN_OFF) for n in range(name.count(b"-") + 1)]
    scope = shielded(*[(name, b"\xff") for name in spellings], (b"host", b"here"))
    assert [name for name, _ in scope["headers"]] == [b"x-request-id", UNWATCHED[0], b"host"]


def test_serve_does_not_watch_for_clients_that_leave() -> None:
    assert parse_disconnect_disabled_header(dict(shielded((b"x-request-disconnect-disabled", b"?0"))["headers"]))


def test_the_request_gets_the_servers_id_and_the_clients_is_kept_aside() -> None:
    scope = shielded((b"x-request-id", b"mine"))
    assert dict(scope["headers"])[b"x-request-id"].decode() == scope[REQUEST_ID_KEY]
    assert re.fullmatch(r"tg-[0-9a-f]{32}", scope[REQUEST_ID_KEY])
    assert scope[CLIENT_ID_KEY] == b"mine"
    assert CLIENT_ID_KEY not in shielded()


def test_trace_headers_go_on_where_serve_can_read_them() -> None:
    good = (b"traceparent", b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    kept = shielded(good, (b"tracestate", b"\xff"))["headers"]
    assert good in kept
    assert not any(name == b"tracestate" for name, _ in kept)


async def test_websockets_are_refused_whatever_their_headers() -> None:
    async def never(*_: Any) -> None:
        raise AssertionError("the application must not see it")

    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await Shield(never)({"type": "websocket", "headers": [(b"x-request-id", b"\xff")]}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


def test_serve_loads_it_by_its_path() -> None:
    assert len(validate_http_proxy_callback_return(call_function_from_import_path(IMPORT_PATH))) == 1


def test_ids_do_not_repeat() -> None:
    assert len({new_request_id() for _ in range(1_000)}) == 1_000


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        (b"abc-1", "abc-1"), (b"", ""), (b"a\r\nb c\x00", "a_b_c_"), (b"\xff\xfe", "_"),
        (b"x" * 1_000_000, "x" * CLIENT_ID_CHARS_MAX),
    ],
)  # fmt: skip
def test_a_clients_id_is_cleaned_and_capped(raw: bytes, clean: str) -> None:
    assert clean_client_id(raw) == clean
