"""Guard rails: roll-back, freeze, flapping, bounds, shadow, foreign writers."""

from __future__ import annotations

import pytest

from policies.config_guard import DEPTH_TURNS_MAX, GuardConfig, KnobGuard
from policies.control.holds import Holds
from policies.control.moves import Place, Value
from policies.steering import ANY, Knob, Lever, Override, Verdict
from policies.types import Knobs, Mode
from tests.unit.control.rig import REPLICAS, SHARE, Rig, Scripted, every, knob_share, quiet_config, with_guard


def admission(script: object, start: float = 0.8) -> Scripted:
    return Scripted(Lever.ADMISSION, {SHARE: start}, script)  # type: ignore[arg-type]


def share_of(rig: Rig) -> float | None:
    plan = rig.results[-1].plan
    return plan.admission.forecast_share


@pytest.mark.parametrize("seed", range(10))
def test_a_change_that_does_harm_is_taken_back_within_30_ticks(seed: int) -> None:
    rig = Rig(quiet_config(), [admission(every(1_000, 0.1))], knob_share({0.1: 0.6}), seed=seed)
    rig.run(80)
    assert len(rig.ticks_of("RolledBack")) == 1
    assert rig.ticks_of("RolledBack")[0] - 40 <= 30
    assert share_of(rig) == 0.8
    bad = next(d for d in rig.state.ledger.latest(100) if d.lever == "admission")
    assert bad.verdict is Verdict.WORSE
    assert bad.realised["met_share"] < 0.7
    assert bad.realised["met_share_before"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_lever_that_does_harm_again_and_again_is_frozen_after_three_roll_backs(seed: int) -> None:
    rig = Rig(quiet_config(), [admission(every(1, 0.1))], knob_share({0.1: 0.6}), seed=seed)
    rig.run(300)
    assert len(rig.ticks_of("RolledBack")) == 3
    assert rig.ticks_of("Frozen") == [rig.ticks_of("RolledBack")[2]]
    assert share_of(rig) == 0.8
    frozen = rig.state.guard.status(rig.now_ns).frozen
    assert [(h.lever, h.knob, h.target) for h in frozen] == [("admission", "forecast_share", ANY)]
    assert "rolled back 3 times" in frozen[0].reason


def test_a_freeze_ends_and_is_said_to_end() -> None:
    rig = Rig(quiet_config(GuardConfig(freeze_s=100)), [admission(every(1, 0.1))], knob_share({0.1: 0.6}))
    rig.run(300)
    assert rig.ticks_of("Thawed")[0] - rig.ticks_of("Frozen")[0] == 100


@pytest.mark.parametrize("seed", range(10))
def test_a_change_without_effect_stays_and_is_called_neutral(seed: int) -> None:
    rig = Rig(quiet_config(), [admission(every(1_000, 0.1))], seed=seed)
    rig.run(90)
    assert share_of(rig) == 0.1
    assert not rig.ticks_of("RolledBack")
    assert [d.verdict for d in rig.state.ledger.latest(9)] == [Verdict.NEUTRAL]


def test_a_change_that_helps_is_called_better() -> None:
    rig = Rig(quiet_config(), [admission(every(1_000, 0.1))], knob_share({0.1: 0.9}, otherwise=0.5))
    rig.run(90)
    assert share_of(rig) == 0.1
    assert [d.verdict for d in rig.state.ledger.latest(9)] == [Verdict.BETTER]


@pytest.mark.parametrize(("factor", "share"), [(0.5, 0.8), (2.0, 0.6)])
def test_a_load_that_changes_much_leaves_no_verdict(factor: float, share: float) -> None:
    demand = lambda second: 40.0 if second < 41 else 40.0 * factor  # noqa: E731
    rig = Rig(quiet_config(), [admission(every(1_000, 0.1))], knob_share({0.1: share}), demand)
    rig.run(90)
    assert share_of(rig) == 0.1
    entry = rig.state.ledger.latest(9)[0]
    assert entry.verdict is Verdict.OVERTAKEN
    assert "requests/s" in entry.verdict_text


def test_a_collapse_at_half_the_load_is_one_because_less_load_breaks_no_promise() -> None:
    """Clients that wait for their answers ask less of a fleet that became slow."""
    demand = lambda second: 40.0 if second < 41 else 20.0  # noqa: E731
    rig = Rig(quiet_config(), [admission(every(1_000, 0.1))], knob_share({0.1: 0.4}), demand)
    rig.run(90)
    assert len(rig.ticks_of("RolledBack")) == 1


def test_a_load_that_grew_no_further_than_was_carried_before_excuses_nothing() -> None:
    """A lull before the change is no measure of what the fleet carries."""

    def lull(second: int) -> float:
        return 32.0 if 30 <= second < 50 else 44.0

    def rise(second: int) -> float:
        return 32.0 if second < 50 else 44.0

    rig = Rig(quiet_config(), [admission(every(1_000, 0.1, begin=50))], knob_share({0.1: 0.78}), lull)
    rig.run(100)
    assert len(rig.ticks_of("RolledBack")) == 1
    rig = Rig(quiet_config(), [admission(every(1_000, 0.1, begin=50))], knob_share({0.1: 0.78}), rise)
    rig.run(100)
    assert not rig.ticks_of("RolledBack"), "nobody saw it carry that much"


def test_what_fell_before_the_change_is_not_blamed_on_it() -> None:
    """A lever that answers to trouble is not the trouble."""
    rig = Rig(quiet_config(), [admission(every(1_000, 0.1))], lambda _: 0.95 if rig.seconds < 37 else 0.5)
    rig.run(90)
    assert share_of(rig) == 0.1
    entry = rig.state.ledger.latest(9)[0]
    assert entry.verdict is Verdict.OVERTAKEN
    assert "began before this change" in entry.verdict_text


def test_the_lever_whose_time_fits_the_fall_is_blamed_and_not_the_one_that_moved_first() -> None:
    place: Place = (Knob.LOAD_BOUND, ANY)
    harm = Scripted(Lever.AFFINITY, {place: 1.5}, every(1_000, 1.0, begin=49))
    bad = lambda plan: 0.4 if plan is not None and plan.load_bound == 1.0 else 0.95  # noqa: E731
    rig = Rig(quiet_config(), [admission(every(1_000, 0.1)), harm], bad)
    rig.run(90)
    plan = rig.results[-1].plan
    assert (plan.load_bound, plan.admission.forecast_share) == (1.5, 0.1)
    verdicts = {d.lever: d.verdict for d in rig.state.ledger.latest(9) if d.lever != "guard"}
    assert verdicts["affinity"] is Verdict.WORSE
    assert verdicts["admission"] is not Verdict.WORSE


def test_two_large_changes_in_one_span_are_blamed_on_neither_and_then_go_one_at_a_time() -> None:
    place: Place = (Knob.LOAD_BOUND, ANY)
    others: dict[int, dict[Place, Value]] = {40: {place: 1.0}, 101: {place: 2.0}}
    steps: dict[int, dict[Place, Value]] = {40: {SHARE: 0.1}, 70: {SHARE: 0.8}, 100: {SHARE: 0.1}}
    first = admission(lambda now, _: steps.get(now, {}))
    other = Scripted(Lever.AFFINITY, {place: 1.5}, lambda now, _: others.get(now, {}))
    rig = Rig(quiet_config(), [first, other], knob_share({0.1: 0.75}))
    rig.run(69)
    assert {d.verdict for d in rig.state.ledger.latest(9) if d.acted} == {Verdict.OVERTAKEN}
    assert not rig.ticks_of("RolledBack")
    rig.run(71)
    assert rig.ticks_of("RolledBack"), "moved apart, the harm is found"
    waited = next(d for r in rig.results for d in r.decisions if d.tick == 101)
    assert (waited.lever, waited.acted) == ("affinity", False)
    assert "until the effect of admission is known" in str(waited.inputs["held_back"])


def test_a_collapse_is_taken_back_from_all_who_moved_and_counts_against_the_first() -> None:
    place: Place = (Knob.LOAD_BOUND, ANY)
    answers = Scripted(Lever.AFFINITY, {place: 1.5}, every(1, 1.0, begin=43))
    rig = Rig(quiet_config(), [admission(every(1, 0.1)), answers], knob_share({0.1: 0.3}))
    rig.run(250)
    assert share_of(rig) == 0.8
    frozen = rig.state.guard.status(rig.now_ns).frozen
    assert [h.lever for h in frozen] == ["admission"]
    first = next(d for d in rig.state.ledger.latest(99) if d.lever == "admission")
    assert first.verdict is Verdict.WORSE


def test_a_roll_back_is_no_experiment_itself() -> None:
    share = knob_share({0.1: 0.6})
    rig = Rig(quiet_config(), [admission(every(1_000, 0.1))], share)
    rig.run(62)
    assert rig.ticks_of("RolledBack")
    rig.share = lambda _: 0.4
    rig.run(100)
    assert len(rig.ticks_of("RolledBack")) == 1
    assert share_of(rig) == 0.8


def test_roll_backs_can_be_switched_off_and_the_verdict_stays() -> None:
    rig = Rig(quiet_config(GuardConfig(rollback=False)), [admission(every(1_000, 0.1))], knob_share({0.1: 0.6}))
    rig.run(90)
    assert share_of(rig) == 0.1
    assert rig.state.ledger.latest(1)[0].verdict is Verdict.WORSE


def test_a_collapse_is_taken_back_early() -> None:
    rig = Rig(quiet_config(), [admission(every(1_000, 0.1))], knob_share({0.1: 0.1}))
    rig.run(90)
    assert rig.ticks_of("RolledBack")[0] - 40 <= 15


def test_one_bad_replica_of_four_is_found_and_only_its_knob_is_put_back() -> None:
    places: dict[Place, Value] = {(Knob.RUNNING_SEQS_MAX, f"r{i}"): 16 for i in range(1, 5)}
    bad: Place = (Knob.RUNNING_SEQS_MAX, "r2")
    lever = Scripted(Lever.BATCH, places, lambda now, _: {bad: 4} if now == 40 else {})
    harm = lambda plan: 0.95 if plan is None or plan.knobs["r2"].running_seqs_max == 16 else 0.72  # noqa: E731
    rig = Rig(quiet_config(), [lever], harm)
    rig.run(80)
    entry = next(d for r in rig.results for d in r.decisions if d.reason.code == "RolledBack")
    assert (entry.target, entry.before, entry.after) == ("r2", {"running_seqs_max": 4}, {"running_seqs_max": 16})
    assert rig.results[-1].plan.knobs["r2"].running_seqs_max == 16


def test_a_fall_that_one_replica_cannot_cause_is_not_blamed_on_it() -> None:
    places: dict[Place, Value] = {(Knob.RUNNING_SEQS_MAX, f"r{i}"): 16 for i in range(1, 11)}
    lever = Scripted(Lever.BATCH, places, lambda now, _: {(Knob.RUNNING_SEQS_MAX, "r2"): 8} if now == 40 else {})
    rig = Rig(quiet_config(), [lever], replicas=10)
    rig.run(41)
    rig.share = lambda _: 0.4
    rig.run(40)
    assert not rig.ticks_of("RolledBack")
    assert rig.state.ledger.latest(1)[0].verdict is Verdict.OVERTAKEN


def test_a_knob_that_turns_back_and_forth_is_frozen_with_the_reason() -> None:
    swing = lambda now, _: {SHARE: 0.5 + 0.1 * (now // 30 % 2)}  # noqa: E731
    rig = Rig(quiet_config(), [admission(swing, 0.5)])
    rig.run(300)
    moved = [d for r in rig.results for d in r.decisions if d.lever == "admission" and d.acted]
    assert len(moved) == 4, "up, and three turns"
    assert "changed direction 3 times" in rig.state.guard.status(rig.now_ns).frozen[0].reason


def test_a_depth_follows_texts_and_may_turn_often_unless_the_configuration_says_otherwise() -> None:
    depth: Place = (Knob.SPECULATIVE_DEPTH, "r1")

    def turns_until_frozen(config: GuardConfig) -> int:
        holds = Holds(config)
        return next(n for n in range(200) if holds.count_move(depth, n % 2 * 8, (n + 1) % 2 * 8, n * 1_000_000_000))

    assert turns_until_frozen(GuardConfig()) == DEPTH_TURNS_MAX
    assert turns_until_frozen(GuardConfig(turns_max=100)) == 100
    assert turns_until_frozen(GuardConfig(knobs={"speculative_depth": KnobGuard(turns_max=2)})) == 2


def test_an_urgent_brake_passes_a_freeze_and_a_foreign_hold_stops_it() -> None:
    swing = lambda now, _: {SHARE: 0.5 + 0.1 * (now // 30 % 2)} if now < 200 else {}  # noqa: E731
    rig = Rig(quiet_config(), [admission(swing, 0.5)])
    rig.run(200)
    assert rig.state.guard.status(rig.now_ns).frozen
    lever = rig.levers[0]
    lever.script, lever.urgent = lambda _now, _: {SHARE: 0.2}, True
    rig.run(2)
    assert share_of(rig) == 0.2


def test_a_frozen_number_of_replicas_may_grow_but_not_fall() -> None:
    swing = lambda now, _: {REPLICAS: 4 + now // 30 % 2} if now < 160 else {}  # noqa: E731
    lever = Scripted(Lever.REPLICAS, {REPLICAS: 4}, swing)
    rig = Rig(quiet_config(), [lever])
    rig.run(170)
    assert rig.state.guard.status(rig.now_ns).frozen
    stands = rig.results[-1].plan.replicas_target
    assert stands is not None
    lever.script = lambda _now, _: {REPLICAS: stands - 1}
    rig.run(5)
    assert rig.results[-1].plan.replicas_target == stands
    lever.script = lambda _now, _: {REPLICAS: stands + 2}
    rig.run(5)
    assert rig.results[-1].plan.replicas_target == stands + 2


def test_bounds_and_pace_hold_for_every_move_and_what_was_asked_is_written() -> None:
    guard = GuardConfig(knobs={"forecast_share": KnobGuard(min=0.5, change_share_max=0.25)})
    rig = Rig(quiet_config(guard), [admission(every(1, 0.1))])
    seen = []
    for _ in range(60):
        rig.second()
        seen.append(share_of(rig))
    assert seen[38:43] == [0.8, 0.6, 0.5, 0.5, 0.5]
    entry = next(d for r in rig.results for d in r.decisions if d.lever == "admission")
    assert (entry.after, entry.inputs["asked_forecast_share"]) == ({"forecast_share": 0.6}, 0.1)
    held = [d for r in rig.results for d in r.decisions if "held_back" in d.inputs]
    assert len(held) == 1, "told once a minute, not each second"


def test_whole_knobs_stay_whole_within_their_bounds() -> None:
    guard = GuardConfig(knobs={"replicas_target": KnobGuard(max=6.5, change_share_max=0.1)})
    rig = Rig(quiet_config(guard), [Scripted(Lever.REPLICAS, {REPLICAS: 4}, every(1, 9.0))])
    rig.run(45)
    targets = [r.plan.replicas_target for r in rig.results[38:]]
    assert targets == [4, 5, 6, 6, 6, 6, 6]


def test_one_knob_in_shadow_is_decided_and_not_acted_on_and_gets_no_verdict() -> None:
    guard = GuardConfig(knobs={"forecast_share": KnobGuard(shadow=True)})
    bound: Place = (Knob.LOAD_BOUND, ANY)
    rig = Rig(
        quiet_config(guard), [admission(every(1_000, 0.1)), Scripted(Lever.AFFINITY, {bound: 1.5}, every(99, 2.0))]
    )
    rig.run(80)
    assert share_of(rig) is None
    assert rig.results[-1].plan.load_bound == 2.0
    entries = {d.lever: d for d in rig.state.ledger.latest(9)}
    assert (entries["admission"].acted, entries["admission"].verdict) == (False, Verdict.PENDING)
    assert entries["affinity"].acted
    assert rig.state.guard.status(rig.now_ns).shadow == ("forecast_share",)


def test_shadow_mode_changes_nothing_and_an_override_still_stands() -> None:
    rig = Rig(quiet_config(mode=Mode.SHADOW), [admission(every(1_000, 0.1))])
    rig.run(50)
    assert rig.results[-1].plan.mode is Mode.SHADOW
    assert share_of(rig) is None
    rig.state.overrides.put(Override("o", Knob.FORECAST_SHARE, value=0.3, remaining_ms=10_000), rig.now_ns)
    rig.run(1)
    assert (rig.results[-1].plan.mode, share_of(rig)) == (Mode.ACT, 0.3)
    rig.run(12)
    assert (rig.results[-1].plan.mode, share_of(rig)) == (Mode.SHADOW, None)


@pytest.mark.slow
def test_somebody_elses_number_of_replicas_is_respected_and_said() -> None:
    rig = Rig(quiet_config(), [Scripted(Lever.REPLICAS, {REPLICAS: 4}, lambda now, _: {REPLICAS: 4})])
    rig.run(40)
    rig.target = 7
    rig.run(5)
    assert rig.results[-1].plan.replicas_target == 7
    entry = next(d for r in rig.results for d in r.decisions if d.reason.code == "ForeignWriter")
    assert (entry.before, entry.after) == ({"replicas_target": 4}, {"replicas_target": 7})
    assert rig.state.guard.status(rig.now_ns).foreign[0].knob == "replicas_target"
    rig.run(590)
    assert rig.results[-1].plan.replicas_target == 7
    rig.run(20)
    assert rig.ticks_of("ForeignOver")
    assert rig.results[-1].plan.replicas_target == 4, "ours again: what the lever wants"


def test_somebody_elses_knob_on_one_engine_is_respected_and_only_that_one() -> None:
    places: dict[Place, Value] = {(Knob.RUNNING_SEQS_MAX, f"r{i}"): 12 for i in range(1, 5)}
    rig = Rig(quiet_config(), [Scripted(Lever.BATCH, places, every(1, 10, begin=60))])
    rig.run(40)
    rig.foreign["r3"] = Knobs(6, 2_048, None)
    rig.run(40)
    assert {name: knobs.running_seqs_max for name, knobs in rig.results[-1].plan.knobs.items()} == {
        "r1": 10, "r2": 10, "r3": 6, "r4": 10,
    }  # fmt: skip
    assert len(rig.ticks_of("ForeignWriter")) == 1


@pytest.mark.slow
def test_engines_that_clip_what_they_are_asked_for_are_not_foreign() -> None:
    places: dict[Place, Value] = {(Knob.RUNNING_SEQS_MAX, f"r{i}"): 16 for i in range(1, 5)}
    rig = Rig(quiet_config(), [Scripted(Lever.BATCH, places, lambda now, _: dict.fromkeys(places, 1 + now // 20 % 30))])
    rig.run(400)
    assert {k.running_seqs_max for k in rig.knobs.values()} == {16}
    assert not rig.ticks_of("ForeignWriter")


def test_a_new_controller_finds_nothing_foreign_in_what_engines_already_follow() -> None:
    places: dict[Place, Value] = {(Knob.RUNNING_SEQS_MAX, f"r{i}"): 16 for i in range(1, 5)}
    rig = Rig(quiet_config(), [Scripted(Lever.BATCH, places, every(1, 8))])
    rig.run(60)
    rig.begin("life2")
    rig.run(60)
    assert not rig.ticks_of("ForeignWriter")


@pytest.mark.slow
def test_what_is_remembered_of_replicas_that_are_gone_is_forgotten() -> None:
    swing = lambda now, values: dict.fromkeys(values, 8 + now % 2)  # noqa: E731
    lever = Scripted(Lever.BATCH, {}, swing)
    rig = Rig(with_guard(quiet_config(), turns_max=1_000), [lever], replicas=1)
    for life in range(40):
        lever.values = {(Knob.RUNNING_SEQS_MAX, f"x{life}-{i}"): 8 for i in range(50)}
        rig.run(10)
    guard = rig.state.guard
    assert len(guard._holds._turns) <= 50 * 8
    assert len(guard._standing) == 50
    assert len(guard._told_ns) <= 50 * 8
