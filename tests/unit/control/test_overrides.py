"""Overrides: they win, end, and outlive the controller."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.config_guard import GuardConfig, KnobGuard
from policies.control.moves import Place, Value
from policies.control.overrides import ENDED_MAX, OVERRIDES_MAX, OverrideBook, OverrideError
from policies.steering import ANY, Knob, Lever, Override
from policies.types import Mode
from tests.unit.control.rig import REPLICAS, SHARE, Rig, Scripted, every, knob_share, quiet_config

S = 1_000_000_000


def override(value: float = 0.3, seconds: float = 20, override_id: str = "o1", **more: object) -> Override:
    made = Override(override_id, Knob.FORECAST_SHARE, value=value, remaining_ms=seconds * 1e3, by="key-1", why="test")
    return replace(made, **more)  # type: ignore[arg-type]


def share_of(rig: Rig) -> float | None:
    return rig.results[-1].plan.admission.forecast_share


def test_an_override_wins_over_the_lever_and_its_end_gives_the_levers_wish_back() -> None:
    rig = Rig(quiet_config(), [Scripted(Lever.ADMISSION, {SHARE: 0.8}, every(1_000, 0.6, begin=45))])
    rig.run(40)
    rig.state.overrides.put(override(), rig.now_ns)
    seen = []
    for _ in range(25):
        rig.second()
        seen.append(share_of(rig))
    assert seen == [0.3] * 19 + [0.6] * 6, "what the lever asked for meanwhile stands afterwards"
    assert rig.ticks_of("OverrideSet") == [41]
    assert rig.ticks_of("OverrideEnded") == [60]
    entry = next(d for r in rig.results for d in r.decisions if d.reason.code == "OverrideSet")
    assert (entry.lever, entry.before, entry.after) == ("guard", {"forecast_share": 0.8}, {"forecast_share": 0.3})
    assert "key-1" in entry.reason.text


def test_an_override_taken_back_early_gives_back_what_stood() -> None:
    rig = Rig(quiet_config(), [Scripted(Lever.ADMISSION, {SHARE: 0.8}, lambda _now, _: {})])
    rig.run(5)
    rig.state.overrides.put(override(), rig.now_ns)
    rig.run(3)
    dropped = rig.state.overrides.drop("o1", rig.now_ns)
    assert dropped is not None
    assert dropped.remaining_ms == pytest.approx(17_000)
    rig.run(1)
    assert share_of(rig) == 0.8
    assert rig.state.overrides.drop("o1", rig.now_ns) is None


def test_an_override_passes_bounds_freezes_and_foreign_holds() -> None:
    guard = GuardConfig(knobs={"replicas_target": KnobGuard(max=5)})
    swing = lambda now, _: {REPLICAS: 4 - now // 10 % 2} if now < 60 else {}  # noqa: E731
    rig = Rig(quiet_config(guard), [Scripted(Lever.REPLICAS, {REPLICAS: 4}, swing)])
    rig.run(60)
    assert rig.state.guard.status(rig.now_ns).frozen
    made = Override("o", Knob.REPLICAS_TARGET, value=9, remaining_ms=5_000)
    rig.state.overrides.put(made, rig.now_ns)
    rig.run(1)
    assert rig.results[-1].plan.replicas_target == 9


def test_nothing_is_rolled_back_under_an_override() -> None:
    rig = Rig(quiet_config(), [Scripted(Lever.ADMISSION, {SHARE: 0.8}, every(1_000, 0.1))], knob_share({0.1: 0.5}))
    rig.run(45)
    rig.state.overrides.put(override(0.1, 100), rig.now_ns)
    rig.run(60)
    assert not rig.ticks_of("RolledBack")
    assert share_of(rig) == 0.1


def test_one_replica_beats_all_of_them_and_late_replicas_get_it_too() -> None:
    places: dict[Place, Value] = {(Knob.RUNNING_SEQS_MAX, f"r{i}"): 16 for i in range(1, 5)}
    rig = Rig(quiet_config(), [Scripted(Lever.BATCH, places, lambda _now, _: {})], replicas=3)
    rig.run(3)
    for_all = Override("a", Knob.RUNNING_SEQS_MAX, value=8, remaining_ms=60_000)
    rig.state.overrides.put(for_all, rig.now_ns)
    rig.state.overrides.put(replace(for_all, id="b", target="r2", value=5), rig.now_ns)
    rig.run(2)
    assert {n: k.running_seqs_max for n, k in rig.results[-1].plan.knobs.items()} == {
        "r1": 8,
        "r2": 5,
        "r3": 8,
        "r4": 16,
    }
    rig.knobs["r4"] = rig.knobs["r1"]
    rig.replicas = 4
    rig.run(2)
    assert rig.results[-1].plan.knobs["r4"].running_seqs_max == 8


def test_a_mode_by_hand_beats_the_configuration_for_one_knob_or_all() -> None:
    lever = Scripted(Lever.ADMISSION, {SHARE: 0.8}, lambda _now, _: {})
    rig = Rig(quiet_config(mode=Mode.SHADOW), [lever])
    act = Override("m", Knob.FORECAST_SHARE, mode="act", remaining_ms=3_000)
    rig.state.overrides.put(act, rig.now_ns)
    rig.run(1)
    assert share_of(rig) == 0.8
    assert "forecast_share" not in rig.state.guard.status(rig.now_ns).shadow
    rig.run(4)
    assert share_of(rig) is None
    rig = Rig(quiet_config(), [lever])
    rig.state.overrides.put(Override("m", None, mode="shadow", remaining_ms=3_000), rig.now_ns)
    rig.run(1)
    assert len(rig.state.guard.status(rig.now_ns).shadow) == len(Knob)


def test_shadow_by_hand_leaves_everything_as_it_stands_while_levers_go_on_for_the_record() -> None:
    rig = Rig(quiet_config(), [Scripted(Lever.ADMISSION, {SHARE: 0.8}, every(1_000, 0.6))])
    rig.run(30)
    rig.state.overrides.put(Override("m", None, mode="shadow", remaining_ms=20_000), rig.now_ns)
    rig.run(15)
    assert share_of(rig) == 0.8
    assert rig.levers[0].values == {SHARE: 0.6}
    assert [d.acted for d in rig.state.ledger.latest(9) if d.lever == "admission"] == [False]
    rig.run(10)
    assert share_of(rig) == 0.6, "it ended: what the lever wants"


def test_overrides_survive_the_controller_with_the_time_they_had_left() -> None:
    rig = Rig(quiet_config(), [Scripted(Lever.ADMISSION, {SHARE: 0.8}, lambda _now, _: {})])
    rig.run(3)
    rig.state.overrides.put(override(seconds=20), rig.now_ns)
    rig.run(5)
    rig.levers[0].values = {SHARE: 0.8}
    rig.begin("life2")
    seen = []
    for _ in range(30):
        rig.second()
        seen.append(share_of(rig))
    assert 14 <= seen.count(0.3) <= 16
    assert seen[0] == 0.3
    assert seen[-1] == 0.8


def test_an_override_that_was_taken_back_is_not_brought_back_by_a_gateway_with_an_older_plan() -> None:
    rig = Rig(quiet_config(), [Scripted(Lever.ADMISSION, {SHARE: 0.8}, lambda _now, _: {})])
    rig.state.overrides.put(override(seconds=500), rig.now_ns)
    rig.run(2)
    old = rig.echo
    rig.state.overrides.drop("o1", rig.now_ns)
    for _ in range(5):
        rig.echo = old
        rig.second()
    assert share_of(rig) == 0.8


def test_of_several_accounts_the_shortest_is_believed() -> None:
    book = OverrideBook(GuardConfig())
    book.adopt([override(seconds=20)], 0)
    book.adopt([override(seconds=12)], 1 * S)
    book.adopt([override(seconds=40)], 2 * S)
    assert [round(o.remaining_ms) for o in book.in_force(3 * S)] == [10_000]


def test_a_later_override_replaces_the_one_of_the_same_knob_and_target_but_not_the_mode() -> None:
    book = OverrideBook(GuardConfig())
    book.put(override(0.3), 0)
    book.put(Override("m", Knob.FORECAST_SHARE, mode="shadow", remaining_ms=5_000), 0)
    book.put(override(0.5, override_id="o2"), 1 * S)
    assert [o.id for o in book.in_force(1 * S)] == ["m", "o2"]
    at = book.value_at((Knob.FORECAST_SHARE, ANY), 1 * S)
    assert at is not None
    assert at.value == 0.5


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("value", {"value": None}),
        ("value", {"mode": "act"}),
        ("value", {"value": float("nan")}),
        ("value", {"value": -1}),
        ("value", {"knob": Knob.REPLICAS_TARGET, "value": 2.5}),
        ("target", {"target": "r1"}),
        ("value", {"knob": Knob.RETIRED, "value": 2, "target": "r1"}),
        ("target", {"knob": Knob.RETIRED, "value": 1}),
        ("mode", {"value": None, "mode": "off"}),
        ("knob", {"knob": None}),
        ("remaining_ms", {"remaining_ms": 0}),
        ("remaining_ms", {"remaining_ms": 86_400_001}),
        ("remaining_ms", {"remaining_ms": float("inf")}),
    ],
)
def test_what_cannot_be_is_refused_and_the_field_is_named(field: str, changes: dict[str, object]) -> None:
    with pytest.raises(OverrideError) as refused:
        OverrideBook(GuardConfig()).put(replace(override(), **changes), 0)  # type: ignore[arg-type]
    assert refused.value.field == field


def test_there_is_room_for_so_many_and_ended_ones_are_forgotten_in_time() -> None:
    book = OverrideBook(GuardConfig())
    one = Override("", Knob.RUNNING_SEQS_MAX, value=4, remaining_ms=1_000)
    for i in range(OVERRIDES_MAX):
        book.put(replace(one, id=f"i{i}", target=f"r{i}"), 0)
    with pytest.raises(OverrideError):
        book.put(replace(one, id="more", target="more"), 0)
    for i in range(3 * ENDED_MAX):
        book.put(replace(one, id=f"j{i}"), 2 * S)
    assert len(book) == 1
    assert len(book._ended) == ENDED_MAX


def test_somebody_may_retire_a_replica_by_hand_and_forbid_it_for_all() -> None:
    rig = Rig(quiet_config(), [Scripted(Lever.ADMISSION, {SHARE: 0.8}, lambda _now, _: {})])
    rig.run(5)
    replica_id = rig.results[-1].signals.replicas[0].latest.replica_id
    rig.state.overrides.put(override(1, knob=Knob.RETIRED, target=replica_id), rig.now_ns)
    rig.run(1)
    assert rig.results[-1].plan.retired == {replica_id}
    rig.state.overrides.drop("o1", rig.now_ns)
    rig.state.overrides.put(override(0, override_id="o2", knob=Knob.RETIRED), rig.now_ns)
    rig.run(1)
    assert rig.results[-1].plan.retired == frozenset()
