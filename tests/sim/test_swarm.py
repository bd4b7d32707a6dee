"""Scenarios drawn from seeds hold every rule; and every rule finds the defect it is there for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator import control, swarm
from autoscaling.simulator.checks import Checker, Violation
from autoscaling.simulator.client import Clients
from autoscaling.simulator.faults import KINDS
from autoscaling.simulator.gateway import Gateway
from autoscaling.simulator.replica import Phase, Replica
from autoscaling.simulator.serve import PoolServe
from autoscaling.simulator.spec import ClientSpec, Fault, NetworkSpec, Pool, Scenario
from autoscaling.simulator.swarm import check, draw, examine
from autoscaling.simulator.workload.generators import from_curve
from autoscaling.simulator.workload.lengths import LogNormal
from autoscaling.simulator.workload.rates import RateCurve
from autoscaling.simulator.workload.trace import Options
from autoscaling.simulator.world import run
from autoscaling.stabilise import Stabilised, Stabiliser
from deployments.scaling import decide
from deployments.simulation.swarm import main
from policies import flow
from policies.admission.gate import AdmissionGate, Pumped
from policies.admission.limits import Admission
from policies.admission.spent import Spent
from policies.config import (
    AdmissionConfig,
    BatchingConfig,
    ControlConfig,
    FaultsConfig,
    ObjectivesConfig,
    PolicyConfig,
    RoutingConfig,
    ScalingConfig,
)
from policies.config_guard import GuardConfig
from policies.control.joint import Count, ReplicaCount
from policies.control.ledger import Ledger
from policies.control.loop import ControlState, TickResult, tick
from policies.control.scaler import ScaleAdvice
from policies.events import Arrived, Finish, Outcome, RefusalKind, SendError
from policies.faults import Quarantine, ReplicaHealth, RetryBudget
from policies.flow import RequestFlow, State
from policies.routing.fleet import Fleet
from policies.routing.load import LoadBook
from policies.routing.prefix_index import PrefixIndex
from policies.types import Knobs, Reason
from tests.sim.worlds import PROFILE, SECOND, SLOW

ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(1, 21)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_rule_holds(seed: int) -> None:
    verdict = examine(seed, decide)
    assert verdict.violation is None, verdict.report()


def test_twenty_seeds_meet_everything_there_is() -> None:
    drawn = [draw(seed).scenario for seed in range(1, 200)]
    assert {f.kind for s in drawn for f in s.faults} == set(KINDS)
    assert {len(s.faults) for s in drawn} == {0, 1, 2, 4, 6}
    assert {s.gateways for s in drawn} == {1, 2, 3, 4}
    assert {s.pools[0].replicas for s in drawn} == {1, 2, 3, 4, 6, 12}
    assert {tuple(p.role for p in s.pools) for s in drawn} == {("both",), ("prefill", "decode")}
    loads = {draw(seed).words[0].split()[1] for seed in range(1, 200)}
    assert loads == {"poisson,", "bursty,", "crowd,", "chat,", "agents,", "groups,", "users,"}


def test_watching_changes_nothing() -> None:
    scenario = draw(17, decide).scenario
    assert check(scenario).digest == run(scenario).digest


def test_one_digest_whatever_the_hash_seed() -> None:
    code = (
        "from autoscaling.simulator.swarm import draw; from autoscaling.simulator.world import run; "
        "from deployments.scaling import decide; print(*(run(draw(s, decide).scenario).digest for s in (3, 17)))"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, text=True, check=True,
        ).stdout.split()
        for hash_seed in ("0", "4242")
    ]  # fmt: skip
    assert printed[0] == printed[1] == [run(draw(seed, decide).scenario).digest for seed in (3, 17)]


def test_another_seed_is_another_run() -> None:
    scenario = draw(3, decide).scenario
    assert run(scenario.with_seed(16)).digest != run(scenario).digest


# --- what the checkers are worth: defects that they must find ---------------------------------------------------------


def storm() -> Scenario:
    """A small fleet that is overloaded while everything goes wrong."""
    profile = replace(PROFILE, cold_start_ms=2_000.0, running_seqs_max=4, kv_tokens=4_000)
    curve = RateCurve.steps([(12.0, 12.0), (16.0, 4.0)])
    faults = [Fault("refuse", 1 * SECOND, 4 * SECOND, replica=n) for n in range(5)]
    faults += [Fault("kill", round(at * SECOND)) for at in (6.0, 6.1, 6.2, 6.3, 9.0, 12.0)]
    faults += [Fault("freeze", 10 * SECOND, 6 * SECOND), Fault("start_fail", 7 * SECOND, 2 * SECOND)]
    return Scenario(
        name="storm",
        source=from_curve(curve, LogNormal(400.0, 60.0, 0.5, 0.5), Options()),
        pools=(Pool(profile, 5, scaler=ReplicaScaler),),
        seed=1,
        config=PolicyConfig(
            admission=AdmissionConfig(
                inflight_requests_max=15, no_replica_wait_ms=3_000.0, retry_after_s_max=4.0, engine_wait_share=None
            ),
            faults=FaultsConfig(
                attempts_max=3, retry_share_max=0.05, retry_burst=4, eject_ms=1_000, eject_ms_max=4_000
            ),
            routing=RoutingConfig(index_blocks_max=50),
            batching=BatchingConfig(enabled=True),
            scaling=ScalingConfig(replicas_min=2, replicas_max=6, up_ticks=1, down_window_s=5.0),
            control=ControlConfig(decisions_max=2),
        ),
        gateways=2,
        clients=ClientSpec(retries_max=1, abort_share=0.1),
        network=NetworkSpec(
            stats_period_ms=4_000.0,
            membership_lag_ms=2_000.0,
            drain_grace_ms=0.0,
            first_byte_timeout_ms=5_000.0,
            idle_timeout_ms=5_000.0,
        ),
        faults=tuple(sorted(faults, key=lambda f: f.at_ns)),
        drain_ns_max=60 * SECOND,
        settle_ns=25 * SECOND,
        local_rule=decide,
    )


def crash() -> Scenario:
    """Replicas die one after the other with long queues, and there is budget for every repetition."""
    config = PolicyConfig(
        admission=AdmissionConfig(engine_wait_share=None),
        faults=FaultsConfig(attempts_max=5, retry_burst=1_000),
        scaling=storm().config.scaling,
    )
    return replace(
        storm(),
        source=from_curve(RateCurve.steps([(2.0, 60.0)]), LogNormal(400.0, 60.0, tokens_max=1_500), Options()),
        config=config,
        faults=tuple(Fault("kill", round(at * SECOND)) for at in (1.5, 1.6, 1.7, 1.8)),
    )


def ebb() -> Scenario:
    """Replicas leave while requests come, and gateways hear of it late."""
    return replace(
        storm(),
        source=from_curve(RateCurve.steps([(30.0, 5.0)]), LogNormal(100.0, 300.0, tokens_max=1_500), Options()),
        network=replace(storm().network, stats_period_ms=60_000.0, membership_lag_ms=4_000.0, drain_ms_max=20_000.0),
        faults=(),
    )


def unguarded(scenario: Scenario, *, joint: bool = True) -> Scenario:
    """Without the guard, which would stop what turns; with or without the joint plan above the scaler."""
    guard = GuardConfig(turns_max=1_000_000, rollback=False, foreign_hold_s=0.001)
    control = replace(scenario.config.control, joint=joint)
    return replace(scenario, config=replace(scenario.config, control=control, guard=guard))


def surge() -> Scenario:
    """Load is there before the controller's first plan, so that the local rule moves first."""
    config = storm().config
    scaling = replace(config.scaling, up_ticks=3, inflight_target=2)
    return replace(
        storm(),
        source=from_curve(RateCurve.steps([(15.0, 30.0)]), LogNormal(400.0, 60.0, tokens_max=1_500), Options()),
        pools=(replace(storm().pools[0], replicas=2),),
        config=replace(config, scaling=scaling),
        faults=(),
    )


def rush() -> Scenario:
    """More than can be served: gateways keep some waiting and refuse the rest."""
    config = storm().config
    admission = replace(config.admission, inflight_requests_max=40, engine_wait_share=0.02, queue_requests_max=3)
    objectives = ObjectivesConfig(ttft_ms=20_000)
    return replace(
        storm(),
        source=from_curve(RateCurve.steps([(5.0, 60.0)]), LogNormal(400.0, 60.0, 0.5, 0.5), Options()),
        config=replace(config, admission=admission, objectives=objectives),
        faults=(),
        settle_ns=60 * SECOND,
    )


def stubborn() -> Scenario:
    """Replicas refuse, no breaker opens, and there is budget for every repetition."""
    faults = FaultsConfig(attempts_max=2, retry_burst=1_000, breaker_failures=1_000)
    return replace(storm(), config=replace(storm().config, faults=faults))


def lame() -> Scenario:
    """One of four replicas is slow, and none may be ejected for that."""
    config = replace(storm().config, faults=FaultsConfig(ejected_share_max=0.0, grey_samples_min=4))
    return replace(
        storm(),
        source=from_curve(RateCurve.steps([(20.0, 20.0)]), LogNormal(400.0, 20.0, tokens_max=1_500), Options()),
        pools=(Pool(SLOW, 4),),
        config=config,
        faults=(Fault("slow", 5 * SECOND, 20 * SECOND, factor=6.0),),
    )


def split() -> Scenario:
    """Prefill and decode apart: streams cannot be continued."""
    pools = (replace(storm().pools[0], role="prefill"), replace(storm().pools[0], role="decode"))
    kills = tuple(Fault("kill", round(at * SECOND), replica=n) for at in (4.0, 6.0, 8.0) for n in (5, 6, 7))
    return replace(storm(), pools=pools, faults=kills)


SCENARIOS = (storm, crash, ebb, surge, rush, stubborn, lame, split)


def test_without_a_defect_every_rule_holds() -> None:
    met: dict[str, int] = {}
    for scenario in SCENARIOS:
        for name, n in check(scenario()).counters.items():
            met[name] = met.get(name, 0) + n
    for name in (
        "kills",
        "retries",
        "refused",
        "broken",
        "refused_connect",
        "refused_draining",
        "cancelled",
        "stops",
        "queued",
        "resumes",
    ):
        assert met[name], name


Patch = pytest.MonkeyPatch
_finish, _dispatch, _upstream_failed = RequestFlow._finish, RequestFlow._dispatch, RequestFlow._on_upstream_failed
_response_ended, _client_gone = RequestFlow._on_response_ended, RequestFlow._on_client_gone
_take_members, _drain, _leave = Gateway.take_members, Replica.drain, Replica._leave


def _kept(self: RequestFlow, outcome: Outcome, code: str, text: str, now_ns: int) -> Finish:
    """Ends without giving anything back."""
    self._state = State.OVER
    return Finish(outcome, Reason(code, text))


def _book_kept(self: RequestFlow, outcome: Outcome, code: str, text: str, now_ns: int) -> Finish:
    self._state = State.OVER
    self._ctx.admission.release(self.request.request_id, Spent(), now_ns)
    return Finish(outcome, Reason(code, text))


def _twice(self: RequestFlow, event: Any, now_ns: int) -> list[Any]:
    ended = _response_ended(self, event, now_ns)
    return [*ended, *ended]


def _forgets_whom_it_tried(self: RequestFlow, choice: Any, replica_id: str, now_ns: int) -> list[Any]:
    effects = _dispatch(self, choice, replica_id, now_ns)
    self._tried.clear()
    return effects


def _repeats_streams(self: RequestFlow, event: Any, now_ns: int) -> list[Any]:
    if self._state is State.STREAMING:
        self._begun = False
        return self._on_broken("", now_ns)
    return _upstream_failed(self, event, now_ns)


def _continues_inexactly(self: RequestFlow, event: Any, now_ns: int) -> list[Any]:
    return _upstream_failed(self, replace(event, resumable=True), now_ns)


def _says_success(self: RequestFlow, event: Any, now_ns: int) -> list[Any]:
    return [self._finish(Outcome.SUCCEEDED, "ok", "it broke off", now_ns)]


def _says_nothing(self: RequestFlow, code: str, why: str, now_ns: int) -> list[Any]:
    return [self._finish(Outcome.FAILED, code, why, now_ns)]


def _error_in_stream(self: RequestFlow, why: str, now_ns: int, code: str = "") -> list[Any]:
    return [SendError(502, "x", "y", "z"), self._finish(Outcome.FAILED, "stream_broken", "", now_ns)]


def _forgets_quarantine(m: Patch) -> None:
    """And does not ask clients to stay away."""

    quarantine = RequestFlow._quarantined

    def quarantined(self: RequestFlow, now_ns: int) -> list[Any]:
        effects = quarantine(self, now_ns)
        return [replace(e, should_retry=None) if isinstance(e, SendError) else e for e in effects]

    m.setattr(Quarantine, "holds", lambda *_: False)
    m.setattr(RequestFlow, "_quarantined", quarantined)


def _queue_unbounded(self: AdmissionGate, request: Any, cost: int, now_ns: int) -> Any:
    reason = self.bounds.refusal(request)
    return None if reason is None else self._overload(reason.code, reason.text, 0.0, cost, now_ns)


def _keeps_members(self: Gateway, members: tuple[str, ...], now_ns: int) -> None:
    _take_members(self, tuple(dict.fromkeys((*self._fleet._members, *members))), now_ns)


def _takes_everything(self: Replica, now_ns: int, attempt: Any) -> None:
    if self.phase in {Phase.STOPPED, Phase.DEAD}:
        self._refuse(attempt, RefusalKind.CONNECT, now_ns)
    else:
        self._admit(attempt, now_ns)


def _keeps_slots(self: Replica, attempt: Any, now_ns: int) -> None:
    self.slots_used += 1
    _leave(self, attempt, now_ns)


def _swings(self: Stabiliser, ask: Any, running: int, fleet: Any, hold_down: Any, now_ns: int) -> Stabilised:
    target = 3 + now_ns // (4 * SECOND) % 2
    return Stabilised(target, ask.reason, (ask.reason,), False)


def _swings_jointly(
    self: ReplicaCount, view: Any, model: Any, target: int | None, advice: ScaleAdvice, now_ns: int
) -> Count:
    return Count(3 + now_ns // (4 * SECOND) % 2, advice.reason)


def _plan(state: ControlState, now_ns: int, **changes: Any) -> TickResult:
    result = tick(state, now_ns)
    return replace(result, plan=replace(result.plan, **changes))


Defect: TypeAlias = tuple[str, Callable[[Patch], None], set[str]]
DEFECTS: list[Defect] = [
    ("a flow gives nothing back", lambda m: m.setattr(RequestFlow, "_finish", _kept), {"bound"}),
    ("a flow gives no load back", lambda m: m.setattr(RequestFlow, "_finish", _book_kept), {"bound"}),
    ("a flow ends twice", lambda m: m.setattr(RequestFlow, "_on_response_ended", _twice), {"one-end"}),
    ("a gone client is ignored", lambda m: m.setattr(RequestFlow, "_on_client_gone", lambda *_: []), {"drained"}),
    ("the budget is ignored", lambda m: m.setattr(RetryBudget, "try_spend", lambda _: True), {"retry-budget"}),
    ("what breaks engines goes on", lambda m: m.setattr(flow, "BROKEN_REPLICAS_MAX", 9), {"poison"}),
    ("the same replica again", lambda m: m.setattr(RequestFlow, "_dispatch", _forgets_whom_it_tried), {"no-repeat"}),
    (
        "streams are repeated",
        lambda m: m.setattr(RequestFlow, "_on_upstream_failed", _repeats_streams),
        {"no-repeat", "one-answer"},
    ),
    (
        "streams are continued that cannot be",
        lambda m: m.setattr(RequestFlow, "_on_upstream_failed", _continues_inexactly),
        {"no-repeat"},
    ),
    ("breakers are ignored", lambda m: m.setattr(Fleet, "block", lambda *_: None), {"alone"}),
    (
        "all may be ejected",
        lambda m: m.setattr(ReplicaHealth, "_outliers_max", property(lambda _: 99)),
        {"alone"},
    ),
    ("quarantine is forgotten", _forgets_quarantine, {"poison"}),
    ("the queue is not bounded", lambda m: m.setattr(AdmissionGate, "_bounds_refusal", _queue_unbounded), {"bound"}),
    ("nobody's turn comes", lambda m: m.setattr(AdmissionGate, "pump", lambda *_: Pumped()), {"drained"}),
    ("no limit of attempts", lambda m: m.setattr(RequestFlow, "_try_again", lambda s, *_: s._route()), {"no-repeat"}),
    (
        "broken is called success",
        lambda m: m.setattr(RequestFlow, "_on_upstream_failed", _says_success),
        {"one-answer"},
    ),
    ("failure without a word", lambda m: m.setattr(RequestFlow, "_unavailable", _says_nothing), {"one-answer"}),
    ("an error inside a stream", lambda m: m.setattr(RequestFlow, "_stream_broken", _error_in_stream), {"one-answer"}),
    ("admission lets all in", lambda m: m.setattr(Admission, "_refusal", lambda *_: None), {"bound"}),
    ("load is never given back", lambda m: m.setattr(LoadBook, "released", lambda *_: None), {"bound"}),
    ("members are kept for ever", lambda m: m.setattr(Gateway, "take_members", _keeps_members), {"leaving"}),
    ("leaving replicas take requests", lambda m: m.setattr(Replica, "receive", _takes_everything), {"leaving"}),
    ("slots are not given back", lambda m: m.setattr(Replica, "_leave", _keeps_slots), {"drained"}),
    ("the dead are not replaced", lambda m: m.setattr(PoolServe, "_on_noticed", lambda *_: None), {"settled"}),
    ("nobody ends a wait", lambda m: m.setattr(Gateway, "_on_waited_out", lambda *_: None), {"bound", "drained"}),
    ("retries are forgotten", lambda m: m.setattr(Clients, "_send", lambda *_: None), {"drained", "no-error"}),
    ("the scaler's number swings", lambda m: m.setattr(Stabiliser, "step", _swings), {"settled"}),
    ("the joint number swings", lambda m: m.setattr(ReplicaCount, "step", _swings_jointly), {"settled"}),
    ("echoes are taken for orders", lambda m: m.setattr(Stabiliser, "_is_echo", lambda *_: False), {"steady"}),
    ("the target is out of bounds", lambda m: m.setattr(control, "tick", partial(_plan, replicas_target=7)), {"plan"}),
    ("plans are not numbered", lambda m: m.setattr(control, "tick", partial(_plan, seq=1)), {"plan"}),
    ("trust beyond 1", lambda m: m.setattr(control, "tick", partial(_plan, affinity_strength=1.5)), {"plan"}),
    (
        "knobs beyond the engine's",
        lambda m: m.setattr(control, "tick", partial(_plan, knobs={"replica-00000": Knobs(99, None)})),
        {"plan"},
    ),
    (
        "the index is not bounded",
        lambda m: m.setattr(PrefixIndex, "__len__", lambda self: len(self._masks) + 51),
        {"bound"},
    ),
    ("the ledger is not bounded", lambda m: m.setattr(Ledger, "__len__", lambda self: self._seq), {"bound"}),
    ("a part fails", lambda m: m.setattr(LoadBook, "first_byte", lambda *_: 1 / 0), {"no-error"}),
]


ELSEWHERE = {
    "leaving replicas take requests": ebb,
    "what breaks engines goes on": crash,
    "members are kept for ever": ebb,
    "echoes are taken for orders": lambda: unguarded(surge(), joint=False),
    "the scaler's number swings": lambda: unguarded(storm(), joint=False),
    "the joint number swings": lambda: unguarded(storm()),
    "streams are continued that cannot be": split,
    "all may be ejected": lame,
    "quarantine is forgotten": lambda: replace(crash(), gateways=1),
    "the queue is not bounded": rush,
    "nobody's turn comes": rush,
    "no limit of attempts": stubborn,
    "the same replica again": stubborn,
}
"""Defects that the storm does not bring out."""


@pytest.mark.parametrize(("name", "defect", "rules"), DEFECTS, ids=[d[0] for d in DEFECTS])
def test_a_defect_is_found(monkeypatch: Patch, name: str, defect: Callable[[Patch], None], rules: set[str]) -> None:
    defect(monkeypatch)
    with pytest.raises(Violation) as caught:
        check(ELSEWHERE.get(name, storm)())
    assert caught.value.rule in rules, str(caught.value)


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_failure_says_what_when_and_how_to_repeat_it(monkeypatch: Patch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Admission, "_refusal", lambda *_: None)
    assert main(["--seed", "11", "--count", "2"]) == 1
    text = capsys.readouterr().out
    assert "broken: bound at " in text
    assert "repeat: make sim SEED=" in text
    assert "  load: " in text


def test_the_command_says_that_all_held(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seed", "3"]) == 0
    assert "1 seeds in" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["--count", "0"])
    assert caught.value.code == 2


def test_a_run_that_never_ends_is_ended(monkeypatch: Patch) -> None:
    monkeypatch.setattr(swarm, "EVENTS_MAX", 1_000)
    with pytest.raises(Violation, match="no end after 1000 events"):
        check(storm())


def test_an_arrival_that_is_seen_twice_is_found() -> None:
    checker = Checker(storm())
    checker.flow(0, 0, "1-1", Arrived(), [])
    with pytest.raises(Violation, match=r"one-end at 0.000 s, request 1-1: it arrived twice"):
        checker.flow(0, 1, "1-1", Arrived(), [])
