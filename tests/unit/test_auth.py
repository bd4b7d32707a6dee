"""Who is let in: nobody without a key that is right, known, not revoked and not expired, and each for its scopes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dashboards.catalogue import Source
from deployments.auth import ANYBODY, CHALLENGE, Authenticator, Principal, check_keys, require
from deployments.endpoints import OWN, RELAYED, scope_needed
from deployments.errors import GatewayError
from deployments.key_file import add_key, revoke_key, write_keys
from deployments.keys import SCOPES, new_key, values_of
from deployments.settings import AuthSettings, Settings, SettingsError
from deployments.telemetry import Telemetry

NOW_S = 1_800_000_000.0
KEY, RECORD = new_key("acme", ["inference", "metrics"], NOW_S)


def clock_s() -> float:
    return NOW_S


def with_keys(*records: Any, file: Path | None = None) -> Authenticator:
    section = {"keys": [values_of(record) for record in records], "keys_file": None if file is None else str(file)}
    return Authenticator(Settings.load({"auth": section}).auth, clock_s)


def refused(auth: Authenticator, headers: dict[bytes, bytes]) -> str:
    with pytest.raises(GatewayError) as caught:
        auth.authenticate(headers)
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert KEY.split("-")[2] not in str(caught.value)
    return caught.value.message


def bearer(key: str) -> dict[bytes, bytes]:
    return {b"authorization": f"Bearer {key}".encode()}


@pytest.mark.parametrize(
    "form",
    [
        "Bearer {}", "bearer {}", "BEARER {}", "bEaReR {}", "Bearer   {}", "  Bearer {}  ", "Bearer {} ",
    ],
)  # fmt: skip
def test_the_scheme_is_read_in_any_case_and_with_any_spaces(form: str) -> None:
    principal = with_keys(RECORD).authenticate({b"authorization": form.format(KEY).encode()})
    assert principal == Principal("acme", frozenset({"inference", "metrics"}), RECORD.id)


def test_anthropics_header_is_a_key_too() -> None:
    auth = with_keys(RECORD)
    assert auth.authenticate({b"x-api-key": KEY.encode()}).tenant == "acme"
    assert auth.authenticate({b"x-api-key": KEY.encode(), **bearer(KEY)}).tenant == "acme"
    assert auth.authenticate({b"x-api-key": KEY.encode(), b"authorization": b"Basic eDp5"}).tenant == "acme"


@pytest.mark.parametrize(
    "headers",
    [
        {}, {b"authorization": b""}, {b"authorization": b"Bearer"}, {b"authorization": b"Bearer "},
        {b"authorization": KEY.encode()}, {b"authorization": f"Bearer{KEY}".encode()},
        {b"authorization": f"Bearer\t{KEY}".encode()}, {b"authorization": f"Basic {KEY}".encode()},
        {b"authorization": f"Bearer {KEY} {KEY}".encode()}, {b"authorization": f"Bearer {KEY}, x".encode()},
        {b"authorization": b"Bearer \xff\xfe"}, {b"x-api-key": b""}, {b"x-api-key": b"   "},
        {b"x-api-key": f"Bearer {KEY}".encode()}, {b"api-key": KEY.encode()}, {b"cookie": KEY.encode()},
        bearer(KEY[:-1]), bearer(KEY + "0"), bearer(KEY.upper()), bearer(KEY[:-1] + "\0"), bearer(f"tg-{RECORD.id}-"),
        bearer(f"tg-{RECORD.id}-{RECORD.hash}"), bearer(f"tg-{RECORD.id}-{RECORD.salt}"), bearer("tg--"),
        bearer(f"tg--{KEY.split('-')[2]}"), bearer("tg-nobody-" + "0" * 64), bearer("sk-" + "a" * 48),
        bearer("tg-" + "a" * 10_000 + "-b"),
    ],
)  # fmt: skip
def test_nothing_else_opens_the_door(headers: dict[bytes, bytes]) -> None:
    refused(with_keys(RECORD), headers)


def test_two_keys_that_differ_are_refused_even_when_one_is_right() -> None:
    other, record = new_key("other", ["inference"], NOW_S)
    auth = with_keys(RECORD, record)
    assert "different" in refused(auth, {**bearer(KEY), b"x-api-key": other.encode()})
    assert "different" in refused(auth, {**bearer(KEY), b"x-api-key": b"x"})


def test_without_configuration_nobody_is_let_in() -> None:
    auth = Authenticator(Settings.load({}).auth, clock_s)
    for headers in ({}, bearer(KEY), bearer("tg--"), {b"x-api-key": b"none"}):
        refused(auth, headers)
    assert auth.keys_valid == 0


def test_the_stand_in_for_unknown_keys_has_no_key() -> None:
    """Its hash is all zeros: no secret has it, the empty one included."""
    auth = with_keys()
    for secret in ("", "0" * 64, "\0" * 32):
        refused(auth, bearer(f"tg--{secret}"))


async def test_none_is_warned_of_when_the_gateway_starts(caplog: pytest.LogCaptureFixture) -> None:
    auth = Authenticator(Settings.load({"auth": "none"}).auth)
    with caplog.at_level(logging.WARNING, "ray.serve"):
        auth.start(Telemetry(Source.GATEWAY))
    assert "auth is 'none'" in caplog.text
    await auth.close()


def test_none_lets_everybody_in_whatever_they_send() -> None:
    auth = Authenticator(Settings.load({"auth": "none"}).auth, clock_s)
    for headers in ({}, bearer("unused"), {b"authorization": b"\xff"}):
        assert auth.authenticate(headers) is ANYBODY
    assert ANYBODY.tenant == "default"
    assert ANYBODY.scopes == frozenset(SCOPES)


def test_why_a_key_is_no_longer_valid_is_told_to_its_holder_only(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    old_key, old = new_key("acme", ["inference"], NOW_S - 10, NOW_S)
    gone_key, gone = new_key("acme", ["inference"], NOW_S)
    write_keys(path, [old, gone])
    revoke_key(path, gone.id, NOW_S)
    auth = with_keys(file=path)
    assert auth.reload()
    assert "expired" in refused(auth, bearer(old_key))
    assert "revoked" in refused(auth, bearer(gone_key))
    for key in (old_key, gone_key):
        assert refused(auth, bearer(key[:-1] + "g")) == refused(auth, bearer("tg-nobody-0"))
    assert auth.keys_valid == 0


# --- scopes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "method", "scope"),
    [
        *((path, "POST", "inference") for path in RELAYED),
        ("/v1/models", "GET", "inference"), ("/v1/models/x", "GET", "inference"), ("/v1/tasks/x", "GET", "inference"),
        ("/metrics", "GET", "metrics"), ("/control/metrics", "GET", "metrics"),
        ("/health", "GET", None), ("/openapi.json", "GET", None),
        ("/control/state", "GET", "control:read"), ("/control/state", "HEAD", "control:read"),
        ("/control/state", "OPTIONS", "control:read"), ("/control/anything", "POST", "control:write"),
        ("/control/anything", "DELETE", "control:write"), ("/control", "PUT", "control:write"),
        ("/controller", "GET", "inference"), ("/", "GET", "inference"), ("/new/path", "GET", "inference"),
    ],
)  # fmt: skip
def test_each_path_needs_its_scope(path: str, method: str, scope: str | None) -> None:
    assert scope_needed(path, method) == scope


def test_only_two_own_paths_are_for_every_key() -> None:
    assert {path for path in OWN if scope_needed(path, "GET") is None} == {"/health", "/openapi.json", "/dashboard"}


def test_a_scope_that_a_key_has_not_is_403_with_its_name() -> None:
    principal = Principal("acme", frozenset({"inference"}), "x")
    require(principal, None)
    require(principal, "inference")
    with pytest.raises(GatewayError) as caught:
        require(principal, "control:write")
    assert (caught.value.status, caught.value.code) == (403, "insufficient_scope")
    assert "control:write" in caught.value.message


def test_the_challenge_names_the_scheme() -> None:
    assert CHALLENGE[1].startswith(b"Bearer ")


# --- the key file -----------------------------------------------------------------------------------------------------


def test_a_file_that_changes_is_followed_and_one_that_does_not_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    write_keys(path, [])
    auth = with_keys(file=path)
    assert auth.reload() is True
    refused(auth, bearer(KEY))
    add_key(path, RECORD)
    assert auth.reload() is True
    assert auth.reload() is None
    assert auth.authenticate(bearer(KEY)).key_id == RECORD.id
    revoke_key(path, RECORD.id, NOW_S)
    assert auth.reload() is True
    refused(auth, bearer(KEY))


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_bytes(b"\xff"),
        lambda path: path.unlink(),
        lambda path: path.chmod(0o666),
        lambda path: path.write_text(path.read_text() * 2),
    ],
)
def test_a_file_that_breaks_keeps_the_last_good_keys_and_is_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], object]
) -> None:
    path = tmp_path / "keys.jsonl"
    write_keys(path, [RECORD])
    auth = with_keys(file=path)
    auth.reload()
    damage(path)
    with caplog.at_level(logging.ERROR, "ray.serve"):
        results = [auth.reload() for _ in range(3)]
    assert results == [False, None, None]
    assert len([record for record in caplog.records if record.levelno >= logging.ERROR]) == 1
    assert RECORD.hash not in caplog.text
    assert auth.authenticate(bearer(KEY)).tenant == "acme"
    path.unlink(missing_ok=True)
    write_keys(path, [])
    assert auth.reload() is True
    refused(auth, bearer(KEY))


def test_the_configurations_keys_win_and_stay(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    _, twin = new_key("intruder", SCOPES, NOW_S)
    write_keys(path, [type(twin)(**(values_of(twin) | {"id": RECORD.id, "scopes": twin.scopes}))])
    auth = with_keys(RECORD, file=path)
    auth.reload()
    assert auth.authenticate(bearer(KEY)).tenant == "acme"


async def test_the_first_request_after_the_start_finds_the_files_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    write_keys(path, [RECORD])
    auth = with_keys(file=path)
    auth.start(Telemetry(Source.GATEWAY))
    assert auth.authenticate(bearer(KEY)).tenant == "acme"
    await auth.close()


async def test_the_file_is_followed_by_a_task_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.auth.RELOAD_S", 0.01)
    path, telemetry = tmp_path / "keys.jsonl", Telemetry(Source.GATEWAY)
    write_keys(path, [])
    auth = with_keys(file=path)
    auth.start(telemetry)

    async def until(text: str) -> None:
        for _ in range(1_000):
            if text in telemetry.render().decode():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(text)

    try:
        await until('tidegate_auth_key_reloads_total{result="ok"} 1.0')
        add_key(path, RECORD)
        await until("tidegate_auth_keys 1.0")
        assert auth.authenticate(bearer(KEY)).tenant == "acme"
        path.write_text("{")
        await until('tidegate_auth_key_reloads_total{result="failed"} 1.0')
        assert RECORD.id not in telemetry.render().decode()
    finally:
        await auth.close()


# --- before the start -------------------------------------------------------------------------------------------------


def checked(section: Any) -> str | None:
    return check_keys(Settings.load({} if section is None else {"auth": section}).auth)


def test_a_start_without_keys_or_without_authentication_is_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "keys.jsonl"
    write_keys(path, [])
    assert "every request will be refused" in str(checked(None))
    assert "every request will be refused" in str(checked({"keys_file": str(path)}))
    assert "auth is 'none'" in str(checked("none"))
    assert checked({"keys": [values_of(RECORD)]}) is None
    add_key(path, RECORD)
    assert checked({"keys_file": str(path)}) is None


@pytest.mark.parametrize("content", [None, "{"])
def test_a_file_that_cannot_be_used_stops_the_start(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError, match=r"^auth\.keys_file: '.*': (cannot be read|line 1)") as caught:
        checked({"keys_file": str(path)})
    assert ("keys create" in str(caught.value)) == (content is None)


def test_settings_of_authentication_are_equal_when_they_say_the_same() -> None:
    assert Settings.load({"auth": "none"}).auth == Settings.load({"auth": "none"}).auth != AuthSettings()
