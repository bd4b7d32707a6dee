"""Who is answered: this host alone, through a front that only this host can reach."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.clients import ClientRule, host_name, is_loopback


def scope(client: str | None = "127.0.0.1", server: str = "127.0.0.1") -> dict[str, Any]:
    return {"client": (client, 1234) if client else None, "server": (server, 8000)}


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost", "LOCALHOST.", "::ffff:127.0.0.1"]
)
def test_loopback_in_all_its_spellings(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "127.0.0.1.evil.example", "*"]
)
def test_what_is_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("header", "name"),
    [
        (b"localhost:8000", "localhost"), (b"localhost", "localhost"), (b"127.0.0.1:8000", "127.0.0.1"),
        (b"[::1]:8000", "::1"), (b"[::1]", "::1"), (b"::1", "::1"), (b"a.example:1", "a.example"), (b"", ""),
    ],
)  # fmt: skip
def test_host_header_without_its_port(header: bytes, name: str) -> None:
    assert host_name(header) == name


@pytest.mark.parametrize("client", ["127.0.0.1", "::1", "10.0.0.5"])
def test_this_host_is_answered(client: str) -> None:
    rule = ClientRule("loopback", "127.0.0.1")
    assert rule.closed_reason is None
    assert rule.refusal(scope(client, "10.0.0.5"), b"localhost:8000") is None


@pytest.mark.parametrize("client", ["10.0.0.6", "8.8.8.8", "fe80::1", None, "evil"])
def test_others_are_refused(client: str | None) -> None:
    error = ClientRule("loopback", "localhost").refusal(scope(client, "10.0.0.5"), b"localhost")
    assert error is not None
    assert (error.status, error.code) == (403, "client_not_allowed")


@pytest.mark.parametrize("front", ["0.0.0.0", "", "::", "10.0.0.5", "*"])
def test_a_front_that_others_reach_answers_nobody_and_says_what_to_change(front: str) -> None:
    rule = ClientRule("loopback", front)
    error = rule.refusal(scope(), b"localhost")
    assert error is not None
    assert error.status == 403
    assert rule.closed_reason is not None
    for setting in ("http_options.host", "gateway.clients"):
        assert setting in error.message
        assert setting in rule.closed_reason


@pytest.mark.parametrize(
    "host", [b"evil.example", b"evil.example:8000", b"127.0.0.1.evil.example", b"[2001:db8::1]:8000"]
)
def test_a_page_that_points_its_own_name_here_is_refused(host: bytes) -> None:
    assert ClientRule("loopback", "127.0.0.1").refusal(scope(), host) is not None


def test_no_host_header_is_no_browser() -> None:
    assert ClientRule("loopback", "127.0.0.1").refusal(scope(), None) is None


def test_the_address_connected_to_is_a_name_of_this_host() -> None:
    assert ClientRule("loopback", "127.0.0.1").refusal(scope("10.0.0.5", "10.0.0.5"), b"10.0.0.5:30000") is None


@pytest.mark.parametrize("front", ["0.0.0.0", "127.0.0.1"])
def test_any_answers_all(front: str) -> None:
    rule = ClientRule("any", front)
    assert rule.closed_reason is None
    assert rule.refusal(scope("8.8.8.8"), b"a.example") is None
