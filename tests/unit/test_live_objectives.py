"""Objectives that change while a gateway and its controller run: who follows, what is refused, who is told."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dashboards.catalogue import Source
from deployments.control_desk import Refused
from deployments.controller import Controller
from deployments.live_objectives import LiveObjectives
from deployments.settings import Settings
from deployments.telemetry import Telemetry
from policies.build import Policies, build_policies
from policies.objectives import objectives_for
from policies.types import Priority

TIGHT = {"objectives": {"ttft_ms": 400, "itl_ms": 50}, "classes": {"batch": {"ttft_ms": 5_000}}}
BROKEN = {"objectives": {"ttft_ms": 400, "e2e_ms": 100}}


def a_gateway() -> tuple[LiveObjectives, Policies, Telemetry]:
    settings = Settings.load({"model": {"name": "m"}})
    policies, telemetry = build_policies(settings.policy_config(), 1), Telemetry(Source.GATEWAY)
    return LiveObjectives(settings, policies, telemetry), policies, telemetry


def test_good_ones_are_in_force_at_once_in_every_policy_of_the_gateway() -> None:
    live, policies, telemetry = a_gateway()
    context = policies.flow_context
    assert live.take(TIGHT)
    assert live.refused is None
    assert policies.config is context.config
    assert objectives_for(policies.config, "m", Priority.INTERACTIVE).ttft_ms == 400
    assert policies.config.classes.batch.ttft_ms == 5_000
    assert context.admission._config is policies.config
    assert context.admission._engine_wait_ms == pytest.approx(0.25 * 400)
    fresh = build_policies(policies.config, 1)  # as if it had been started with them
    assert policies.capacity._gap_ms_max == fresh.capacity._gap_ms_max
    assert policies.explorer._ttft_ms_max == fresh.explorer._ttft_ms_max
    assert getattr(policies.router, "_promise") == getattr(fresh.router, "_promise")  # noqa: B009 (a Protocol's private)
    assert 'tidegate_objectives_reloads_total{result="ok"} 1.0' in telemetry.render().decode()


@pytest.mark.parametrize("given", [BROKEN, {"model": {}}, [1], "fast", {"objectives": {"ttft_ms": -1}}])
def test_what_is_wrong_is_refused_without_an_exception_and_the_old_ones_stay(given: Any) -> None:
    live, policies, telemetry = a_gateway()
    live.take(TIGHT)
    before = policies.config
    assert not live.take(given)
    assert policies.config is before
    assert live.refused
    assert 'tidegate_objectives_reloads_total{result="refused"} 1.0' in telemetry.render().decode()
    assert live.take({})  # mended: what the settings say
    assert live.refused is None
    assert policies.config.objectives.ttft_ms == 2_000


class Caller:
    """Stands where the controller stands."""

    def __init__(self, in_force: Any = None) -> None:
        self.in_force = in_force
        self.calls: list[tuple[Any, ...]] = []

    async def __call__(self, method: str, *args: Any) -> Any:
        self.calls.append((method, *args))
        return self.in_force if method == "objectives" else None


async def test_each_life_of_the_controller_is_told_once() -> None:
    live, _, _ = a_gateway()
    call = Caller()
    await live.tell(call, "e1", "g1")
    assert call.calls == []  # nothing came with user_config
    live.take(TIGHT)
    for epoch in ("e1", "e1", "e2", "e2"):
        await live.tell(call, epoch, "g1")
    assert call.calls == [("set_objectives", TIGHT, "g1")] * 2
    live.take({})
    await live.tell(call, "e2", "g1")
    assert call.calls[-1] == ("set_objectives", {}, "g1")


async def test_a_gateway_that_starts_under_a_broken_user_config_takes_what_the_controller_was_told() -> None:
    live, policies, _ = a_gateway()
    live.take(BROKEN)
    await live.tell(Caller(None), "e1", "g2")
    assert policies.config.objectives.ttft_ms == 2_000
    await live.tell(Caller(TIGHT), "e1", "g2")
    assert policies.config.objectives.ttft_ms == 400
    assert live.refused  # and still says what is wrong


def test_the_controller_steers_by_them_and_refuses_what_contradicts_itself() -> None:
    controller = Controller({"model": {"name": "m"}}, lambda: None)
    desk = controller.desk
    controller.tick()
    assert desk.objectives is None
    assert desk.set_objectives(TIGHT, "g1") is None
    controller.tick()
    assert controller.state()["objectives"]["ttft_ms"] == 400
    assert controller.state()["objectives_by_class"]["batch"]["ttft_ms"] == 5_000
    text = controller.telemetry().render().decode()
    assert 'tidegate_control_objective_ttft_seconds{priority="interactive"} 0.4' in text
    assert 'tidegate_control_objective_ttft_seconds{priority="batch"} 5.0' in text
    assert re.search(r'budget_share{objective="ttft",priority="batch"} 0\.05', text)
    assert re.search(r'budget_share{objective="availability",priority="batch"} 0\.01', text)
    refused = desk.set_objectives(BROKEN, "g1")
    assert isinstance(refused, Refused)
    assert "e2e_ms" in refused.message
    assert desk.objectives == TIGHT
    assert controller.state()["objectives"]["ttft_ms"] == 400


def test_a_controller_that_changed_decides_as_one_that_was_started_so() -> None:
    changed = Controller({"model": {"name": "m"}}, lambda: None)
    changed.desk.set_objectives(TIGHT, "g1")
    started = Controller({"model": {"name": "m"}, "objectives": {"ttft_ms": 400, "itl_ms": 50}}, lambda: None)
    for controller in (changed, started):
        assert controller._control.config.objectives.itl_ms == 50
        assert controller._control.guard._config.objectives.itl_ms == 50
        assert controller._control.adapter._joint is not None
        assert controller._control.adapter._joint.model._objectives.itl_ms == 50
