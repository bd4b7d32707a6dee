"""The page at /dashboard as it is served: to whoever asks, with nothing of this system in it; and what it asks for."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import MutableMapping
from typing import Any

import pytest

from deployments.auth import Authenticator
from deployments.clients import ClientRule
from deployments.control_overview import COLUMNS, short
from deployments.controller import Controller
from deployments.core import GatewayCore
from deployments.dashboard_page.serving import FOLDER, SCRIPTS, load_page
from deployments.endpoints import OPEN, PAGE, REQUEST_PREFIX, allowed_methods, label_of, scope_needed
from deployments.errors import GatewayError
from deployments.http_front import HttpFront
from deployments.keys import CONTROL_READ, SCOPES, new_key, values_of
from deployments.openapi import describe
from deployments.own_answers import OwnAnswers
from deployments.recent_requests import KEPT, RecentRequests
from deployments.request_log import RequestRecord
from deployments.served import Served
from policies.events import Outcome
from policies.types import Reason
from tests.page_stand import Link, Stand
from tests.unit.gateway_bench import a_core

BYTES_MAX = 60_000
KEYS = {scope: new_key("acme", [scope], 0) for scope in SCOPES}


@pytest.fixture
def controller() -> Controller:
    def fail() -> None:
        raise AssertionError("the controller gave up")

    return Controller({"auth": "none"}, fail)


@pytest.fixture
async def core() -> GatewayCore:
    return a_core(auth={"keys": [values_of(record) for _, record in KEYS.values()]})


@pytest.fixture
def front(core: GatewayCore, controller: Controller) -> HttpFront:
    """The real one, with keys; the line to the controller has no Ray between."""
    served = Served([core], [Link(controller)])  # type: ignore[list-item]
    return HttpFront(served, ClientRule("any", ""), Authenticator(core.settings.auth), OwnAnswers(served))


async def ask(
    front: HttpFront, method: str, path: str, key: str | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> MutableMapping[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    if key is not None:
        given.append((b"x-api-key", KEYS[key][0].encode()))
    await front({"type": "http", "method": method, "path": path, "headers": given}, receive, send)
    head = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], head, b"".join(message.get("body", b"") for message in sent[1:])


# --- the page ---------------------------------------------------------------------------------------------------------


async def test_the_page_is_told_without_a_key_and_with_any(front: HttpFront) -> None:
    status, head, body = await ask(front, "GET", PAGE)
    assert (status, head["content-type"], body) == (200, "text/html; charset=utf-8", load_page().body)
    assert head["content-length"] == str(len(body))
    assert head["x-request-id"].startswith("tg-")
    assert head["x-content-type-options"] == "nosniff"
    for key in (None, *SCOPES):
        assert (await ask(front, "GET", PAGE + "/", key))[2] == body
    assert (await ask(front, "GET", PAGE, authorization="Bearer wrong"))[2] == body


async def test_nothing_else_is_open_without_a_key_and_the_page_by_get_and_head_only(front: HttpFront) -> None:
    assert frozenset({PAGE}) == OPEN
    for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
        assert (await ask(front, method, PAGE))[0] == 401
    for path in (PAGE + "//", PAGE + "/x", PAGE.upper(), "/control/overview", REQUEST_PREFIX + "tg-1", "/"):
        assert (await ask(front, "GET", path))[0] == 401, path
    status, head, _ = await ask(front, "POST", PAGE, "inference")
    assert (status, head["allow"]) == (405, "GET, HEAD, OPTIONS")
    status, head, _ = await ask(front, "OPTIONS", PAGE, "inference")
    assert (status, head["allow"]) == (204, "GET, HEAD, OPTIONS")


async def test_a_client_from_elsewhere_does_not_get_the_page_where_only_this_host_is_answered(front: HttpFront) -> None:
    front._rule = ClientRule("loopback", "0.0.0.0")
    status, _, body = await ask(front, "GET", PAGE)
    assert (status, json.loads(body)["error"]["code"]) == (403, "client_not_allowed")


async def test_nothing_is_changed_for_a_page_of_another_site(front: HttpFront, controller: Controller) -> None:
    controller.tick()
    for site, status in (("cross-site", 403), ("same-site", 403), ("same-origin", 200), ("none", 200)):
        found = await ask(front, "DELETE", "/control/overrides", "control:write", sec_fetch_site=site)
        assert found[0] == status, site
    assert (await ask(front, "DELETE", "/control/overrides", "control:write"))[0] == 200


async def test_a_head_request_has_the_heads_of_a_get_and_no_body(front: HttpFront) -> None:
    _, of_get, _ = await ask(front, "GET", PAGE)
    status, of_head, body = await ask(front, "HEAD", PAGE)
    del of_get["x-request-id"], of_head["x-request-id"]
    assert (status, of_head, body) == (200, of_get, b"")


async def test_who_has_the_page_is_not_sent_it_again(front: HttpFront) -> None:
    tag = (await ask(front, "GET", PAGE))[1]["etag"]
    for seen in (tag, f'"other", {tag}', "*"):
        status, head, body = await ask(front, "GET", PAGE, if_none_match=seen)
        assert (status, head["etag"], body) == (304, tag, b"")
        assert "content-security-policy" in head
        assert "content-length" not in head
    assert (await ask(front, "GET", PAGE, if_none_match='W/"0"'))[0] == 200


@pytest.mark.parametrize(
    ("accepted", "packed"),
    [("gzip, br", True), ("br;q=1.0, GZIP;q=0.8", True), ("*", True), ("gzip;q=0", False), ("br", False), ("", False)],
)
async def test_it_is_packed_for_those_who_take_it(front: HttpFront, accepted: str, packed: bool) -> None:
    _, head, body = await ask(front, "GET", PAGE, accept_encoding=accepted)
    assert head["vary"] == "accept-encoding"
    assert (head.get("content-encoding") == "gzip") is packed
    assert (gzip.decompress(body) if packed else body) == load_page().body
    assert head["content-length"] == str(len(body))


async def test_the_policy_lets_the_browser_run_these_bytes_only_and_talk_to_nobody_else(front: HttpFront) -> None:
    _, head, body = await ask(front, "GET", PAGE)
    policy = dict(part.strip().split(" ", 1) for part in head["content-security-policy"].split(";"))
    text = body.decode()
    for name, tag in (("script-src", "script"), ("style-src", "style")):
        inline = re.findall(rf"<{tag}[^>]*>(.*?)</{tag}>", text, re.DOTALL)
        assert len(inline) == 1
        assert policy[name] == f"'sha256-{base64.b64encode(hashlib.sha256(inline[0].encode()).digest()).decode()}'"
    assert (policy["default-src"], policy["connect-src"], policy["frame-ancestors"]) == ("'none'", "'self'", "'none'")


def test_the_page_is_small_and_brings_all_it_needs() -> None:
    text = load_page().body.decode()
    assert len(text.encode()) < BYTES_MAX
    elsewhere = set(re.findall(r"https?://[^\s\"'`)]+|@import|url\(", text)) - {"http://www.w3.org/2000/svg"}
    assert elsewhere == set()
    assert set(re.findall(r"(?:src|href)=\"([^\"#]+)", text)) == {"data:,"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|localStorage|eval\(", text)
    assert {path.name for path in FOLDER.glob("*.js")} == set(SCRIPTS)


async def test_openapi_tells_of_the_page_and_that_it_needs_no_key(front: HttpFront) -> None:
    page = json.loads(describe("m", keys_needed=True))["paths"][PAGE]
    assert set(page["get"]["responses"]["200"]["content"]) == {"text/html"}
    assert page["get"]["security"] == page["head"]["security"] == []
    assert "security" not in page["options"]
    assert "304" in page["get"]["responses"]
    assert "security" not in json.loads(describe("m", keys_needed=True))["paths"]["/health"]["get"]


# --- what it asks for -------------------------------------------------------------------------------------------------


async def test_the_overview_has_a_row_for_each_replica_and_what_an_operator_wants_to_know(
    front: HttpFront, controller: Controller
) -> None:
    stand = Stand("", controller, replicas=8)
    for _ in range(3):
        stand.report()
    stand.decide()
    status, head, body = await ask(front, "GET", "/control/overview", CONTROL_READ)
    assert (status, head["content-type"]) == (200, "application/json")
    found = json.loads(body)
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["replicas"]]
    assert [row["id"] for row in rows] == [f"replica-{n:05d}" for n in range(8)]
    assert [row["state"] for row in rows[4:7]] == ["starting", "draining", "stuck"]
    assert rows[2]["ejected_by"] == 2
    full = rows[1]
    assert (full["running"], full["waiting"], full["kv_share"], full["running_seqs_max"]) == (256, 40, 0.975, 256)
    assert 0.4 < rows[0]["hit_share"] < 0.6
    assert found["traffic"]["arrivals_ps"] > 0
    assert found["traffic"]["ttft"]["p95_ms"] >= found["traffic"]["ttft"]["p50_ms"] > 0
    assert found["objective"]["priced"] is False
    assert found["objective"]["met_share"] > 0.5
    assert [g["id"] for g in found["gateways"]] == ["gateway-000", "gateway-001"]
    newest = found["decisions"][0]
    assert (newest["why"], newest["code"]) == ("832 tokens a step keep gaps within 190 ms with 16 running", "WithinItl")
    assert newest["seq"] == max(d["seq"] for d in found["decisions"])
    assert {k["knob"] for k in found["knobs"]} > set(found["plan"]) - {"seq"}
    assert found["conditions"]["watched"] > 10


async def test_before_anything_reports_the_overview_says_that_nothing_is_known(
    front: HttpFront, controller: Controller
) -> None:
    for _ in range(2):
        found = json.loads((await ask(front, "GET", "/control/overview", CONTROL_READ))[2])
        assert (found["blind"], found["replicas"], found["traffic"], found["fleet"]) == (True, [], None, None)
        assert found["objective"]["met_share"] is None
        controller.tick()


def test_a_replica_takes_a_few_bytes_of_the_overview(controller: Controller) -> None:
    stand = Stand("", controller, replicas=500)
    for _ in range(2):
        stand.report()
    overview = controller.overview()
    assert len(overview) < 500 * 150 + 20_000
    assert len(json.loads(overview)["replicas"][0]) == len(COLUMNS)


def test_cost_and_promises_are_of_the_last_minute(controller: Controller, monkeypatch: pytest.MonkeyPatch) -> None:
    at_ns = 0
    monkeypatch.setattr("deployments.controller.now_ns", lambda: at_ns)
    stand = Stand("", controller, replicas=1)
    for second in range(200):
        at_ns = second * 1_000_000_000
        stand.report()
    objective = json.loads(controller.overview())["objective"]
    assert 55 <= objective["seconds"] <= 60
    assert objective["usd_per_hour"] == 1.0


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, None),
        (float("nan"), None),
        (float("inf"), None),
        (0, 0),
        (0.123456, 0.1235),
        (12345.6, 12346),
        (-2.34567, -2.346),
    ],
)
def test_figures_are_rounded_to_what_is_read(value: float | None, told: float | None) -> None:
    assert short(value) == told


# --- one request ------------------------------------------------------------------------------------------------------


def a_record(request_id: str, tenant: str = "acme") -> RequestRecord:
    record = RequestRecord(request_id, "/v1/completions", arrival_ns=1, tenant=tenant)
    record.sent("r1", 2)
    record.finish("succeeded", "ok", 3)
    return record


async def test_what_became_of_a_request_is_told_with_the_reason_of_its_replica(
    front: HttpFront, core: GatewayCore
) -> None:
    core.recent.put(a_record("tg-1"), Reason("prefix_hit", "r1 holds 640 of 700 tokens"))
    status, _, body = await ask(front, "GET", REQUEST_PREFIX + "tg-1", CONTROL_READ)
    found = json.loads(body)
    assert (status, found["id"], found["replicas"], found["ends"]) == (200, "tg-1", ["r1"], ["ok"])
    assert found["routed"] == {"code": "prefix_hit", "text": "r1 holds 640 of 700 tokens"}
    assert found["gateway"] == "gateway"


async def test_a_request_that_is_not_here_is_404_and_the_gateway_says_who_it_is(front: HttpFront) -> None:
    status, _, body = await ask(front, "GET", REQUEST_PREFIX + "tg-0", CONTROL_READ)
    error = json.loads(body)["error"]
    assert (status, error["code"]) == (404, "request_not_found")
    assert "Gateway gateway " in error["message"]
    assert (await ask(front, "GET", REQUEST_PREFIX + "tg-0", "inference"))[0] == 403
    assert (await ask(front, "GET", REQUEST_PREFIX + "a/b", CONTROL_READ))[0] == 404


async def test_the_last_requests_are_kept_and_none_of_those_without_a_key(core: GatewayCore) -> None:
    for number in range(KEPT + 1):
        core.recent.put(a_record(f"tg-{number}"))
    core.recent.put(a_record("tg-nobody", tenant=""))
    for gone in ("tg-0", "tg-nobody"):
        with pytest.raises(GatewayError, match="does not have this request"):
            core.recent.show(gone)
    assert core.recent.show("tg-1")["routed"] is None


async def test_a_request_refused_for_its_body_is_kept_and_one_without_a_key_is_not(
    front: HttpFront, core: GatewayCore
) -> None:
    head = (await ask(front, "POST", "/v1/completions", "inference"))[1]
    assert core.recent.show(head["x-request-id"])["outcome"] == Outcome.REFUSED
    head = (await ask(front, "POST", "/v1/completions"))[1]
    with pytest.raises(GatewayError):
        core.recent.show(head["x-request-id"])


def test_paths_methods_scopes_and_labels_of_what_the_page_asks_for() -> None:
    assert scope_needed(REQUEST_PREFIX + "x", "GET") == scope_needed("/control/overview", "GET") == CONTROL_READ
    assert allowed_methods(REQUEST_PREFIX + "x") == ("GET", "HEAD", "OPTIONS")
    assert allowed_methods(REQUEST_PREFIX) == allowed_methods(REQUEST_PREFIX + "x/y") == ()
    assert label_of(REQUEST_PREFIX + "tg-1") == REQUEST_PREFIX + "{id}"
    assert RecentRequests("g")._kept == {}
