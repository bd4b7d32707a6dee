"""The joint plan: what is bought, sold, put off and given way to, and what the ledger can say of it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from policies.config import ControlConfig, PolicyConfig, ScalingConfig
from policies.control.joint import Arbiter
from policies.control.levers import TARGET
from policies.control.loop import ControlState, tick
from policies.control.moves import Move
from policies.steering import Knob, Lever
from policies.types import FleetView, Reason
from tests.unit.control.fleet import SECOND_NS, TinyFleet, decisions, gateway_report, noisy, replica_report
from tests.unit.control.test_loop import FixedScaler

CONFIG = PolicyConfig(scaling=ScalingConfig(replicas_max=4, up_ticks=3, down_window_s=60))
ONE_PS = 3.0
"""Requests per second of 100 + 60 tokens that one replica carries within the objectives, about."""

CALM_PS = 1.0


def turns(targets: list[int]) -> int:
    steps = [b - a for a, b in itertools.pairwise(targets) if a != b]
    return sum((a > 0) != (b > 0) for a, b in itertools.pairwise(steps))


# --- replicas ---------------------------------------------------------------------------------------------------------


def test_a_burst_that_ends_before_a_replica_could_help_buys_none() -> None:
    fleet = TinyFleet(CONFIG)
    fleet.run(60, CALM_PS)
    fleet.run(18, ONE_PS * 3)
    fleet.run(120, CALM_PS)
    assert set(fleet.targets) == {1}
    held = [d for d in decisions(fleet, "replicas") if d.reason.code == "WaitsForBurst"]
    assert held
    assert held[0].alternatives[0].change.endswith("replicas")
    assert held[0].alternatives[0].predicted["met_share"] >= held[0].predicted["met_share"]


@pytest.mark.slow
def test_a_load_that_stays_is_bought_for_and_sold_when_it_goes() -> None:
    fleet = TinyFleet(CONFIG)
    fleet.run(60, ONE_PS * 0.5)
    fleet.run(120, ONE_PS * 2)
    most = fleet.target
    assert most >= 2
    bought = next(d for d in decisions(fleet, "replicas") if d.reason.code == "KeepsPromises")
    assert set(bought.predicted) == {"successes_per_usd", "met_share", "ttft_ms", "itl_ms"}
    assert bought.alternatives[0].why_not
    assert bought.inputs["arrivals_ps"] == pytest.approx(ONE_PS * 2, rel=0.3)
    fleet.run(150, ONE_PS * 0.3)
    assert fleet.target == 1
    assert "FewerSuffice" in [d.reason.code for d in decisions(fleet, "replicas")]


@pytest.mark.slow
@pytest.mark.parametrize(("load", "seed"), [(0.5, 0), (0.9, 1), (1.3, 2), (1.7, 3)])
def test_noise_of_a_fifth_turns_the_number_at_most_once_in_ten_minutes(load: float, seed: int) -> None:
    fleet = TinyFleet(CONFIG)
    fleet.run(120, ONE_PS * load)
    fleet.targets.clear()
    fleet.run(600, noisy(ONE_PS * load, 0.2, seed))
    assert turns(fleet.targets) <= 1


@pytest.mark.parametrize("silent", ["r2", "fleet", "gateway"])
def test_nothing_is_sold_while_somebody_is_silent(silent: str) -> None:
    fleet = TinyFleet(CONFIG)
    fleet.run(60, ONE_PS * 0.5)
    fleet.run(120, ONE_PS * 2)
    most = fleet.target
    fleet.mute = {silent}
    fleet.run(150, ONE_PS * 0.3)
    assert min(fleet.targets[-150:]) == most


def test_a_scaler_that_cannot_go_on_from_another_number_is_not_overruled() -> None:
    state = ControlState(CONFIG, FixedScaler(3), "e")
    for i in range(1, 40):
        now_ns = i * SECOND_NS
        state.receive_replica(replica_report("r1", i, steps=1, running=1, decode_tokens=10), now_ns)
        state.receive_gateway(gateway_report(seq=i, arrivals=1, succeeded=1, output_tokens=10), now_ns)
        state.receive_fleet(FleetView(1, 1, 1, 4), now_ns)
        result = tick(state, now_ns)
    assert result.plan.replicas_target == 3


def test_a_target_outside_the_bounds_comes_back_into_them() -> None:
    fleet = TinyFleet(replace(CONFIG, scaling=replace(CONFIG.scaling, replicas_max=2)))
    fleet.target = 3
    fleet.run(60, ONE_PS * 0.5)
    assert fleet.target <= 2


def test_what_the_guard_says_of_the_number_is_where_the_next_tick_begins() -> None:
    fleet = TinyFleet(CONFIG)
    fleet.run(60, ONE_PS * 0.5)
    wishes = dict(fleet.results[-1].adaptation.wishes)
    fleet.state.adapter.adopt({**wishes, TARGET: 3}, fleet.now_ns)
    fleet.run(40, ONE_PS * 0.5)
    assert decisions(fleet, "replicas")[0].before == {"replicas_target": 3}


def test_without_joint_the_scaler_decides_alone() -> None:
    fleet = TinyFleet(replace(CONFIG, control=ControlConfig(joint=False)))
    fleet.run(60, ONE_PS * 0.5)
    fleet.run(18, ONE_PS * 3)
    assert fleet.target > 1


# --- one lever per symptom --------------------------------------------------------------------------------------------


def move(lever: Lever, knob: Knob, target: str, *cures: str, urgent: bool = False) -> Move:
    place = (knob, target)
    reason = Reason("Why", "because")
    return Move(lever, target, {place: 1}, {place: 2}, reason, cures=frozenset(cures), urgent=urgent)


ROUTE = move(Lever.AFFINITY, Knob.LOAD_BOUND, "*", "slo_burn_fast")
LET_IN = move(Lever.ADMISSION, Knob.FORECAST_SHARE, "*", "slo_burn_fast")
BATCH = move(Lever.BATCH, Knob.STEP_TOKENS_MAX, "r1", "prefill_bound")
DRAFT = move(Lever.SPECULATION, Knob.SPECULATIVE_DEPTH, "r1")


def test_the_cheaper_lever_goes_first_and_the_other_is_told_as_an_alternative() -> None:
    made, refused = Arbiter(CONFIG).choose([LET_IN, ROUTE], SECOND_NS)
    assert [m.lever for m in made] == [Lever.AFFINITY]
    assert refused == [LET_IN]
    assert [(a.lever, a.change) for a in made[0].alternatives] == [("admission", "forecast_share 2")]


def test_the_other_lever_may_go_once_the_first_has_settled() -> None:
    arbiter = Arbiter(CONFIG)
    arbiter.choose([ROUTE], SECOND_NS)
    assert arbiter.choose([LET_IN], 3 * SECOND_NS)[0] == []
    assert arbiter.choose([LET_IN], 6 * SECOND_NS)[0] == [LET_IN]


def test_one_lever_may_go_on_with_what_it_began() -> None:
    arbiter = Arbiter(CONFIG)
    arbiter.choose([ROUTE], SECOND_NS)
    assert arbiter.choose([ROUTE], 2 * SECOND_NS)[0] == [ROUTE]


def test_nothing_moves_on_a_replica_that_settles_but_brakes() -> None:
    arbiter = Arbiter(CONFIG)
    assert arbiter.choose([BATCH, DRAFT], SECOND_NS) == ([_with(BATCH, DRAFT)], [DRAFT])
    elsewhere = move(Lever.SPECULATION, Knob.SPECULATIVE_DEPTH, "r2")
    brake = replace(DRAFT, urgent=True)
    assert arbiter.choose([elsewhere, brake], 2 * SECOND_NS)[0] == [elsewhere, brake]


def _with(made: Move, refused: Move) -> Move:
    chosen, _ = Arbiter(CONFIG).choose([made, refused], SECOND_NS)
    assert chosen[0].alternatives
    return chosen[0]


def test_other_symptoms_do_not_wait_for_each_other() -> None:
    other = move(Lever.ADMISSION, Knob.SHED_FACTOR, "*", "queue_growing")
    made, refused = Arbiter(CONFIG).choose([other, ROUTE], SECOND_NS)
    assert len(made) == 2
    assert not refused


def test_a_lever_that_had_to_wait_goes_on_from_where_it_was() -> None:
    fleet = TinyFleet(CONFIG)
    fleet.run(30, ONE_PS * 0.5)
    adapter = fleet.state.adapter
    before = dict(fleet.results[-1].adaptation.wishes)
    place = (Knob.STEP_TOKENS_MAX, "r1")
    refused = Move(Lever.BATCH, "r1", {place: 512}, {place: 64}, Reason("Why", "because"))
    wishes = {**before, place: 64}
    adapter._take_back([refused], [], wishes, fleet.now_ns)
    assert wishes[place] == 512
    assert all(lever.wishes.get(place, 512) == 512 for lever in adapter._levers)
