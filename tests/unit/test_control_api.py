"""The control plane over HTTP, from the request's bytes to the controller's memory: what is taken, refused, audited."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from deployments.auth import Principal
from deployments.control_api import ControlApi, page_of, since_unix_s
from deployments.control_desk import DecisionFilter
from deployments.controller import Controller
from deployments.controller_actor import ControllerActor
from deployments.endpoints import allowed_methods, label_of, scope_needed
from deployments.errors import GatewayError
from deployments.keys import CONTROL_READ, CONTROL_WRITE
from policies.control.ledger import Draft
from policies.steering import Knob
from policies.types import Mode, Reason

OPERATOR = Principal("ops", frozenset({CONTROL_WRITE}), "k7")
OVERRIDES, SHADOW = "/control/overrides", "/control/shadow"


class Link:
    """Stands where the gateway's line to the controller stands: the same methods, without Ray between."""

    def __init__(self, controller: Controller) -> None:
        self._actor = ControllerActor.__new__(ControllerActor)
        self._actor._take({"m": controller})

    async def ask(self, method: str, *args: Any) -> Any:
        return await getattr(self._actor, method)(*args)


@pytest.fixture
def controller() -> Controller:
    def fail() -> None:
        raise AssertionError("the controller gave up")

    return Controller({"guard": {"override_s_max": 7_200}}, fail)


@pytest.fixture
def api(controller: Controller) -> ControlApi:
    return ControlApi(Link(controller))  # type: ignore[arg-type]


async def change(api: ControlApi, method: str, path: str, body: Any = None) -> Any:
    """What a client reads."""
    answer = await api.change(method, path, b"" if body is None else json.dumps(body).encode(), OPERATOR)
    return json.loads(json.dumps(answer, allow_nan=False))


async def refusal(api: ControlApi, method: str, path: str, body: Any = None) -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        await change(api, method, path, body)
    assert caught.value.type == "invalid_request_error"
    return caught.value


def force(controller: Controller) -> None:
    controller.tick()
    assert controller.plan is not None


# --- overrides --------------------------------------------------------------------------------------------------------


async def test_an_override_is_held_listed_in_the_plan_and_taken_back(api: ControlApi, controller: Controller) -> None:
    held = await change(api, "POST", OVERRIDES, {"knob": "load_bound", "value": 1.25, "expires_in_s": 60, "why": "x"})
    assert (held["knob"], held["value"], held["target"], held["by"], held["why"]) == (
        "load_bound",
        1.25,
        "*",
        "k7",
        "x",
    )
    assert 59 < held["expires_in_s"] <= 60
    assert held["expires_at"].endswith("Z")
    listed = await api.read(OVERRIDES, b"")
    assert [row["id"] for row in listed["data"]] == [held["id"]]
    force(controller)
    assert controller.plan is not None
    assert [o.id for o in controller.plan.overrides] == [held["id"]]
    assert controller.plan.load_bound == 1.25
    gone = await change(api, "DELETE", f"{OVERRIDES}/{held['id']}")
    assert [row["id"] for row in gone["data"]] == [held["id"]]
    force(controller)
    assert controller.plan.overrides == ()
    assert (await refusal(api, "DELETE", f"{OVERRIDES}/{held['id']}")).status == 404


async def test_all_overrides_are_taken_back_at_once(api: ControlApi) -> None:
    for knob in ("load_bound", "step_tokens_max"):
        await change(api, "POST", OVERRIDES, {"knob": knob, "value": 64})
    assert len((await change(api, "DELETE", OVERRIDES))["data"]) == 2
    assert (await api.read(OVERRIDES, b""))["data"] == []
    assert (await change(api, "DELETE", OVERRIDES))["data"] == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"knob": "speed", "value": 1}, "knob"),
        ({"value": 1}, "knob"),
        ({"knob": 7, "value": 1}, "knob"),
        ({"knob": "load_bound"}, "value"),
        ({"knob": "load_bound", "value": 1, "mode": "act"}, "value"),
        ({"knob": "load_bound", "value": "1"}, "value"),
        ({"knob": "load_bound", "value": True}, "value"),
        ({"knob": "load_bound", "value": -1}, "value"),
        ({"knob": "step_tokens_max", "value": 10**18}, "value"),
        ({"knob": "step_tokens_max", "value": 1e300}, "value"),
        ({"knob": "step_tokens_max", "value": 1.5}, "value"),
        ({"knob": "load_bound", "mode": "off"}, "mode"),
        ({"knob": "load_bound", "mode": ["act"]}, "mode"),
        ({"knob": "load_bound", "value": 1, "expires_in_s": 0}, "expires_in_s"),
        ({"knob": "load_bound", "value": 1, "expires_in_s": "1h"}, "expires_in_s"),
        ({"knob": "load_bound", "value": 1, "expires_in_s": 7_201}, "expires_in_s"),
        ({"knob": "load_bound", "value": 1, "target": "r9"}, "target"),
        ({"knob": "load_bound", "value": 1, "why": "x" * 501}, "why"),
        ({"knob": "load_bound", "value": 1, "why": "a\nb"}, "why"),
        ({"knob": "load_bound", "value": 1, "until": "noon"}, "until"),
    ],
)
async def test_a_wrong_override_is_refused_with_the_field(api: ControlApi, body: dict[str, Any], param: str) -> None:
    error = await refusal(api, "POST", OVERRIDES, body)
    assert (error.status, error.param) == (400, param), error
    assert error.message.startswith(param)
    assert (await api.read(OVERRIDES, b""))["data"] == []


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"x"', b"\xff", b"[" * 100_000])
async def test_a_body_that_is_no_object_is_400(api: ControlApi, body: bytes) -> None:
    for path in (OVERRIDES, SHADOW):
        with pytest.raises(GatewayError) as caught:
            await api.change("POST", path, body, OPERATOR)
        assert caught.value.status == 400


class Lines(logging.Handler):
    """Messages of one logger, whatever other tests or Ray made of the loggers above it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


@pytest.fixture
def log() -> Iterator[Lines]:
    logger, lines = logging.getLogger("ray.serve"), Lines()
    level, logger.disabled = logger.level, False  # import-linter, run in this process before, disables all loggers
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(lines)
    logger.setLevel(level)


async def test_every_change_is_in_the_log_with_the_keys_id(api: ControlApi, log: Lines) -> None:
    held = await change(api, "POST", OVERRIDES, {"knob": "load_bound", "value": 1.1})
    await change(api, "POST", SHADOW, {"shadow": True})
    await change(api, "DELETE", f"{OVERRIDES}/{held['id']}")
    await refusal(api, "POST", OVERRIDES, {"knob": "load_bound", "value": 1, "target": "r9"})
    lines = [line for line in log.seen if line.startswith("control: ")]
    assert len(lines) == 4
    assert all("'k7'" in line and "'ops'" in line for line in lines)
    assert "load_bound" in lines[0]
    assert held["id"] in lines[2]


# --- shadow mode ------------------------------------------------------------------------------------------------------


def modes(answer: Any) -> dict[str, str]:
    return {row["knob"]: row["mode"] for row in answer["data"]}


async def test_shadow_mode_of_one_knob_and_of_all(api: ControlApi, controller: Controller) -> None:
    everything = {knob.value: "act" for knob in Knob}
    assert modes(await api.read(SHADOW, b"")) == everything
    one = await change(api, "POST", SHADOW, {"shadow": True, "knob": "replicas_target", "expires_in_s": 60})
    assert modes(one) == everything | {"replicas_target": "shadow"}
    row = next(row for row in one["data"] if row["knob"] == "replicas_target")
    assert row["because"].startswith("override ")
    assert 59 < row["expires_in_s"] <= 60
    assert set(modes(await change(api, "POST", SHADOW, {"shadow": True})).values()) == {"shadow"}
    force(controller)
    assert controller.plan is not None
    assert controller.plan.mode is Mode.SHADOW or controller.plan.load_bound is None
    assert modes(await change(api, "POST", SHADOW, {"shadow": False})) == everything
    assert (await api.read(OVERRIDES, b""))["data"] == []  # nothing is left behind


async def test_where_the_configuration_says_shadow_off_makes_an_override_to_act() -> None:
    controller = Controller({"control": {"mode": "shadow"}}, lambda: None)
    api = ControlApi(Link(controller))  # type: ignore[arg-type]
    assert set(modes(await api.read(SHADOW, b"")).values()) == {"shadow"}
    answer = modes(await change(api, "POST", SHADOW, {"shadow": False, "knob": "load_bound"}))
    assert [knob for knob, mode in answer.items() if mode == "act"] == ["load_bound"]
    assert set(modes(await change(api, "POST", SHADOW, {"shadow": False})).values()) == {"act"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "shadow"),
        ({"shadow": 1}, "shadow"),
        ({"shadow": True, "knob": "x"}, "knob"),
        ({"shadow": True, "value": 1}, "value"),
    ],
)  # fmt: skip
async def test_a_wrong_shadow_body_is_refused(api: ControlApi, body: dict[str, Any], param: str) -> None:
    assert (await refusal(api, "POST", SHADOW, body)).param == param


# --- reading ----------------------------------------------------------------------------------------------------------


async def test_conditions_are_all_told_with_their_next_step(api: ControlApi, controller: Controller) -> None:
    before = (await api.read("/control/conditions", b""))["data"]
    force(controller)
    after = (await api.read("/control/conditions", b""))["data"]
    json.dumps(after, allow_nan=False)
    assert [row["name"] for row in before] == [row["name"] for row in after]
    assert all(row["next_step"] and row["begin"] and row["title"] for row in after)


async def test_state_is_that_of_now_or_of_one_of_the_last_ticks(api: ControlApi, controller: Controller) -> None:
    for _ in range(3):
        controller.tick()
    now = await api.read("/control/state", b"")
    assert (now["tick"], "guard" in now) == (3, True)
    assert [(await api.read("/control/state", b"tick=%d" % tick))["tick"] for tick in (1, 2, 3)] == [1, 2, 3]
    for query, status, code in ((b"tick=4", 404, "tick_not_kept"), (b"tick=-1", 400, None)):
        with pytest.raises(GatewayError) as caught:
            await api.read("/control/state", query)
        assert (caught.value.status, caught.value.code, caught.value.param) == (status, code, "tick")


def write(controller: Controller, lever: str, target: str, at_ns: int) -> None:
    reason = Reason("R", "because")
    draft = Draft(lever=lever, target=target, before={"x": 1}, after={"x": 2}, reason=reason, inputs={})
    controller._control.ledger.write(draft, 1, at_ns, ())


async def test_decisions_are_filtered_by_lever_target_and_time(api: ControlApi, controller: Controller) -> None:
    from deployments.clock import now_ns

    at_ns = now_ns()
    for lever, target, age_s in (("batch", "r1", 900), ("batch", "r2", 60), ("replicas", "m", 30), ("guard", "r1", 1)):
        write(controller, lever, target, at_ns - age_s * 1_000_000_000)

    async def seqs(query: bytes) -> list[int]:
        return [entry["seq"] for entry in await api.read("/control/decisions", query)]

    assert await seqs(b"") == [1, 2, 3, 4]
    assert await seqs(b"lever=batch") == [1, 2]
    assert await seqs(b"target=r1") == [1, 4]
    assert await seqs(b"since=5m") == [2, 3, 4]
    assert await seqs(b"since=45s&lever=guard&limit=1") == [4]
    assert await seqs(b"since_seq=1&lever=batch") == [2]
    assert await seqs(b"lever=batch&limit=1") == [2]
    entry = (await api.read("/control/decisions", b"limit=1"))[0]
    assert entry["at"].endswith("Z")
    assert entry["epoch"] == controller.epoch


@pytest.mark.parametrize(
    ("query", "param"),
    [
        (b"limit=0", "limit"), (b"limit=1001", "limit"), (b"limit=x", "limit"), (b"since_seq=-1", "since_seq"),
        (b"lever=brake", "lever"), (b"since=yesterday", "since"), (b"since=2026-11-30T10:00:00", "since"),
        (b"since=5w", "since"), (b"since=" + b"9" * 5_000 + b"s", "since"),
    ],
)  # fmt: skip
def test_a_wrong_query_is_refused_with_the_field(query: bytes, param: str) -> None:
    with pytest.raises(GatewayError) as caught:
        page_of(query, 0.0)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_since_is_a_span_or_a_time() -> None:
    assert since_unix_s("90s", 1_000.0) == 910.0
    assert since_unix_s("1.5h", 10_000.0) == 4_600.0
    assert since_unix_s("1970-01-01T00:01:00Z", 0.0) == 60.0
    assert since_unix_s("1970-01-01T01:01:00+01:00", 0.0) == 60.0
    assert page_of(b"", 0.0) == (100, None, DecisionFilter())


# --- paths ------------------------------------------------------------------------------------------------------------


def test_paths_methods_scopes_and_labels() -> None:
    assert allowed_methods(OVERRIDES) == ("GET", "HEAD", "POST", "DELETE", "OPTIONS")
    assert allowed_methods(f"{OVERRIDES}/a1") == ("DELETE", "OPTIONS")
    assert allowed_methods(f"{OVERRIDES}/a1/b") == allowed_methods(f"{OVERRIDES}/") == ()
    assert allowed_methods(SHADOW) == ("GET", "HEAD", "POST", "OPTIONS")
    assert allowed_methods("/control/conditions") == ("GET", "HEAD", "OPTIONS")
    assert label_of(f"{OVERRIDES}/a1") == f"{OVERRIDES}/{{id}}"
    for path in (OVERRIDES, SHADOW, f"{OVERRIDES}/a1"):
        for method in allowed_methods(path):
            reads = method in {"GET", "HEAD", "OPTIONS"}
            assert scope_needed(path, method) == (CONTROL_READ if reads else CONTROL_WRITE)
