"""Who gets in: now, later, or not; and what those that do not are told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest

from policies.admission.forecast import OUTPUT_WEIGHT, Forecast
from policies.admission.gate import AdmissionGate, Entry
from policies.admission.spent import Spent
from policies.config import (
    AdmissionConfig,
    ClassConfig,
    ClassesConfig,
    ObjectivesConfig,
    PolicyConfig,
    PricesConfig,
    TenantConfig,
)
from policies.events import Usage
from policies.types import Priority, Request

MS = 1_000_000
SECOND = 1_000_000_000


@dataclass
class Fleet:
    """What admission sees of a fleet, set by the test."""

    wait_ms: float | None = 0.0
    idle_ms: float = 100.0
    tps: float = 1_000.0
    size: int = 4
    own_requests: int = 1
    free: tuple[int, int] | None = None

    def replicas(self, now_ns: int) -> int:
        return 0 if self.wait_ms is None else self.size

    def ready(self, prompt_tokens: int, wait_ms_max: float, count: int, now_ns: int) -> int:
        return min(count, self.size) if self.wait_ms is not None and self.wait_ms <= wait_ms_max else 0

    def slots(self, now_ns: int) -> tuple[int, int] | None:
        return self.free

    def idle_ttft_ms(self, prompt_tokens: int, now_ns: int) -> float | None:
        return None if self.wait_ms is None else self.idle_ms

    def gap_ms(self, now_ns: int) -> float | None:
        return 10.0

    def tokens_per_s(self, prompt_tokens: float, output_tokens: float, output_weight: float, now_ns: int) -> float:
        return self.tps


FULL = 10_000.0
"""A wait at every replica that is far too long to send anything on."""


def request(request_id: str = "r", prompt_tokens: int = 80, output_tokens: int = 10, **more: Any) -> Request:
    values: dict[str, Any] = {
        "request_id": request_id, "model": "m", "endpoint": "/v1/completions", "tenant": "t",
        "prompt_tokens": prompt_tokens, "output_tokens_max": output_tokens, "blocks": (), "block_tokens": 64,
        "stream": True, "arrival_ns": 0,
    }  # fmt: skip
    return Request(**(values | more))


def gate(fleet: Fleet, admission: dict[str, Any] | None = None, **config: Any) -> AdmissionGate:
    return AdmissionGate(PolicyConfig(admission=AdmissionConfig(**(admission or {})), **config), fleet, Random(0))


def fill(door: AdmissionGate, count: int, **more: Any) -> list[str]:
    """Codes of ``count`` arrivals at one time; "" for those that wait."""
    codes = []
    for i in range(count):
        verdict = door.arrive(request(f"{more.get('tenant', 't')}-{more.get('priority', '')}-{i}", **more), 0)
        assert verdict.entry is not Entry.ADMITTED
        codes.append(verdict.refusal.code if verdict.refusal else "")
    return codes


# --- in or not --------------------------------------------------------------------------------------------------------


def test_idle_fleet_takes_everything_one_after_the_other_so_that_one_free_slot_is_given_once() -> None:
    door = gate(Fleet(size=1))
    entries = [door.arrive(request(str(i)), 0).entry for i in range(3)]
    assert entries == [Entry.ADMITTED, Entry.QUEUED, Entry.QUEUED]
    assert door.pump(MS).granted == ()
    for sent, following in (("0", "1"), ("1", "2")):
        door.sent(sent)
        assert door.pump(MS).granted == (following,)
    assert door.pump(MS).granted == ()


def test_without_any_replica_everybody_waits_for_the_first_one_elsewhere() -> None:
    door = gate(Fleet(wait_ms=None))
    assert [door.arrive(request(str(i)), 0).entry for i in range(20)] == [Entry.ADMITTED] * 20


def test_gateway_queue_can_be_switched_off() -> None:
    door = gate(Fleet(wait_ms=FULL), {"engine_wait_share": None})
    assert [door.arrive(request(str(i)), 0).entry for i in range(20)] == [Entry.ADMITTED] * 20


def test_full_fleet_queues_what_it_can_serve_in_time_and_refuses_the_rest_at_once() -> None:
    # 100 tokens each at 1,000 a second: 0.1 s each. Due in 2 s, 80 % of it; 0.5 s at the engine, 0.1 s alone: 1 s here
    codes = fill(gate(Fleet(wait_ms=FULL)), 30)
    assert codes == [""] * 11 + ["overloaded"] * 19


def test_queue_is_let_through_when_a_replica_would_begin_soon() -> None:
    fleet = Fleet(wait_ms=FULL, size=2)
    door = gate(fleet)
    fill(door, 6)
    assert door.pump(10 * MS).granted == ()
    fleet.wait_ms = 400.0
    first, second = door.pump(20 * MS).granted
    assert door.pump(20 * MS).granted == (), "as many on the way as replicas would begin soon"
    door.sent(first)
    door.sent(second)
    fleet.size = 1
    for _ in range(4):
        (granted,) = door.pump(20 * MS).granted
        door.sent(granted)
    assert door.queue.requests == 0


def test_what_would_come_too_late_is_given_up_in_the_queue() -> None:
    door = gate(Fleet(wait_ms=FULL))
    fill(door, 3)
    assert door.pump(1_390 * MS).expired == ()
    assert len(door.pump(1_400 * MS).expired) == 3, "2 s less 0.5 s at the engine and 0.1 s of prefill"


def test_long_prompt_that_nobody_can_serve_within_the_objective_is_due_later_not_never() -> None:
    door = gate(Fleet(wait_ms=FULL, idle_ms=5_000.0))
    assert door.arrive(request(), 0).entry is Entry.QUEUED
    assert door.pump(9_000 * MS - 5_000 * MS).expired == ()


def test_everything_let_in_is_given_back_once() -> None:
    fleet = Fleet(size=2)
    door = gate(fleet)
    for i in range(6):
        door.arrive(request(str(i)), 0)
    for i in range(6):
        for _ in range(2):
            door.release(str(i), Spent(80, 0, 10, counted=True), SECOND)
    assert (door.requests, door.tokens, door.queue.requests, door.queue.tokens) == (0, 0, 0, 0)
    assert door.arrive(request("next"), SECOND).entry is Entry.ADMITTED


def test_gateway_with_nothing_at_any_replica_may_send_one_whatever_old_samples_say() -> None:
    door = gate(Fleet(wait_ms=FULL, own_requests=0))
    assert [door.arrive(request(str(i)), 0).entry for i in range(2)] == [Entry.ADMITTED, Entry.QUEUED]


# --- deadlines --------------------------------------------------------------------------------------------------------


def test_deadline_no_fleet_could_meet_is_refused_without_a_time_to_come_again() -> None:
    verdict = gate(Fleet(idle_ms=100.0)).arrive(request(output_tokens=10, deadline_ns=150 * MS), 0)
    assert verdict.refusal is not None
    assert (verdict.refusal.code, verdict.refusal.retry_after_s) == ("deadline_unreachable", None)
    assert verdict.refusal.should_retry is False


def test_late_deadline_lets_a_request_wait_longer_than_the_objective() -> None:
    door = gate(Fleet(wait_ms=FULL))
    assert fill(door, 12)[-1] == "overloaded"
    patient = door.arrive(request("patient", deadline_ns=60 * SECOND), 0)
    assert patient.entry is Entry.QUEUED
    assert "patient" not in door.pump(30 * SECOND).expired


def test_request_whose_best_replica_would_be_too_late_is_refused_when_it_is_to_be_sent() -> None:
    door = gate(Fleet())
    asked = request()
    door.arrive(asked, 0)
    assert door.too_late(asked, 1_900.0, 50 * MS) is None
    assert door.too_late(asked, None, 50 * MS) is None, "nothing is predicted"
    late = door.too_late(asked, 2_500.0, 50 * MS)
    assert late is not None
    assert (late.code, late.status) == ("overloaded", 429)


# --- classes ----------------------------------------------------------------------------------------------------------


def test_lower_classes_are_shed_first_as_pressure_grows() -> None:
    door = gate(Fleet(wait_ms=FULL), {"forecast_share": 1.0}, objectives=ObjectivesConfig(ttft_ms=10_000))
    shed_at: dict[str, int] = {}
    for i in range(60):
        door.arrive(request(f"i{i}", priority=Priority.INTERACTIVE), 0)
        for priority in (Priority.STANDARD, Priority.BATCH):
            probe = f"{priority}-{i}"
            refusal = door.arrive(request(probe, priority=priority), 0).refusal
            door.release(probe, Spent(), 0)
            if refusal is not None and refusal.code == "shed":
                shed_at.setdefault(priority, i)
    assert shed_at["batch"] < shed_at["standard"]
    assert shed_at["batch"] == 10, "1 s of interactive work is a tenth of the objective"


def test_class_has_an_objective_of_its_own() -> None:
    classes = ClassesConfig(batch=ClassConfig(ttft_ms=30_000, shed_share=1.0))
    door = gate(Fleet(wait_ms=FULL), classes=classes)
    assert fill(door, 12, priority=Priority.STANDARD).count("") == 11
    assert fill(door, 100, priority=Priority.BATCH).count("") > 50


def test_outputs_are_capped_under_pressure_only_for_tenants_that_allow_it() -> None:
    tenants = {"yes": TenantConfig(brownout_output_tokens_max=5), "no": TenantConfig()}
    door = gate(Fleet(wait_ms=FULL), {"brownout_share": 0.2}, tenants=tenants)
    assert door.arrive(request("first", tenant="yes"), 0).output_tokens_cap is None
    fill(door, 5, tenant="no")
    assert door.arrive(request("a", tenant="yes"), 0).output_tokens_cap == 5
    assert door.arrive(request("b", tenant="no"), 0).output_tokens_cap is None
    assert door.arrive(request("c", tenant="yes", output_tokens=3), 0).output_tokens_cap is None, "it is short already"


# --- tenants ----------------------------------------------------------------------------------------------------------


def test_tenant_within_its_share_gets_in_beside_one_whose_queue_is_full() -> None:
    door = gate(Fleet(wait_ms=FULL))
    assert fill(door, 30, tenant="greedy")[-1] == "overloaded"
    modest = door.arrive(request("modest", tenant="modest"), 0)
    assert modest.entry is Entry.QUEUED
    order = [door.queue.pop() for _ in range(2)]
    assert [w.tenant for w in order if w is not None] == ["greedy", "modest"], "then it was served least"


def test_request_refused_by_the_forecast_costs_its_tenant_nothing() -> None:
    tenants = {"t": TenantConfig(requests_per_minute_max=60)}
    fleet = Fleet(wait_ms=FULL)
    door = gate(fleet, tenants=tenants)
    assert fill(door, 40).count("overloaded") == 29
    assert door.tenants.usage()["t"].requests == 11


def tenant_with_slots(now: int, most: int) -> tuple[AdmissionGate, Fleet]:
    """Tenant ``b`` had ``most`` requests open at once and has ``now`` of them; ``a`` has half of the 16 slots."""
    fleet = Fleet(size=100, free=(16, 16))
    door = gate(fleet)
    for i in range(8):
        door.arrive(request(f"a{i}", tenant="a"), 0)
    for i in range(most):
        door.arrive(request(f"b{i}", tenant="b"), 0)
    for i in range(now, most):
        door.release(f"b{i}", Spent(80, 0, 10, counted=True), SECOND)
    for i in range(8):
        door.sent(f"a{i}")
    for i in range(now):
        door.sent(f"b{i}")
    fleet.free = (16, 8 - now)
    return door, fleet


def test_slots_stay_free_for_a_tenant_within_its_share_from_one_beyond_its_own() -> None:
    door, fleet = tenant_with_slots(now=1, most=4)
    assert door.arrive(request("a-more", tenant="a"), SECOND).entry is Entry.ADMITTED, "7 are free, 3 are kept for b"
    door.sent("a-more")
    fleet.free = (16, 3)
    assert door.arrive(request("a-late", tenant="a"), SECOND).entry is Entry.QUEUED
    assert door.arrive(request("b-next", tenant="b"), SECOND).entry is Entry.QUEUED, "it comes behind one that waits"
    assert door.pump(SECOND).granted == ("b-next",), "and is let through before it"


def test_kept_slots_are_given_away_as_their_tenant_stays_away() -> None:
    door, fleet = tenant_with_slots(now=0, most=4)
    fleet.free = (16, 2)
    assert door.arrive(request("a-more", tenant="a"), SECOND).entry is Entry.QUEUED
    assert door.pump(15 * SECOND).expired == ("a-more",)
    assert door.arrive(request("a-later", tenant="a"), 60 * SECOND).entry is Entry.ADMITTED


def test_embeddings_without_output_are_charged_and_requests_no_engine_saw_are_not() -> None:
    prices = PricesConfig(prompt_usd_per_mtok=1.0)
    door = gate(Fleet(), prices=prices)
    door.arrive(request("seen", output_tokens=0), 0)
    door.arrive(request("unseen"), 0)
    assert door.release("seen", Spent.of(Usage(prompt_tokens=1_000), 80, 0), 0) == pytest.approx(0.001)
    assert door.release("unseen", Spent.of(Usage(), 80, 0), 0) == 0.0


# --- forecast ---------------------------------------------------------------------------------------------------------


def forecast(fleet: Fleet | None = None, **admission: Any) -> Forecast:
    return Forecast(AdmissionConfig(**admission), fleet or Fleet(), Random(1))


def watched(known: Forecast, tokens_ps: float, seconds: int, begin_s: int = 0, waiting: bool = True) -> int:
    """So many tokens a second are let through; when it is over."""
    for i in range(1, seconds * 10 + 1):
        known.watch(waiting, round(tokens_ps / 10), begin_s * SECOND + i * 100 * MS)
    return (begin_s + seconds) * SECOND


def test_rate_begins_with_the_step_models_and_becomes_what_was_served() -> None:
    known = forecast(Fleet(tps=1_000.0))
    assert known.rate(0) == pytest.approx(1_000.0)
    assert known.rate(watched(known, 500, 30)) == pytest.approx(500.0, rel=0.05)
    assert known.rate(watched(known, 2_000, 30, 30)) == pytest.approx(2_000.0, rel=0.05)


def test_rate_is_not_learned_while_nobody_waits() -> None:
    known = forecast(Fleet(tps=1_000.0))
    assert known.rate(watched(known, 10, 30, waiting=False)) == pytest.approx(1_000.0)


def test_rate_follows_replicas_that_come_back_at_once() -> None:
    fleet = Fleet(tps=250.0)
    known = forecast(fleet)
    now_ns = watched(known, 200, 20)
    fleet.tps = 1_000.0
    assert known.rate(now_ns + SECOND) == pytest.approx(800.0, rel=0.1)


def test_rate_of_an_outage_does_not_refuse_everybody_after_it() -> None:
    known = forecast(Fleet(tps=1_000.0))
    assert known.rate(watched(known, 0, 20)) == pytest.approx(400.0)


def test_cost_counts_outputs_as_long_as_they_usually_are() -> None:
    known = forecast()
    for _ in range(500):
        known.learn(100, 20)
    assert known.cost(100, None) == pytest.approx(100 + OUTPUT_WEIGHT * 20, abs=3)
    assert known.cost(100, 5) == 100 + OUTPUT_WEIGHT * 5
    assert known.cost(100, 5_000) == known.cost(100, None)


def test_those_refused_later_are_told_to_come_later() -> None:
    known = forecast(retry_after_jitter_share=0.0, retry_after_s=0.001)
    told = [known.retry_after_s(0.0, 500, 0) for _ in range(10)]
    assert told == pytest.approx([0.001] + [0.5 * i for i in range(1, 10)])
    assert known.retry_after_s(0.0, 500, 5 * SECOND) == pytest.approx(0.001), "all promises are worked off"


def test_time_to_come_again_has_bounds_and_jitter() -> None:
    known = forecast(retry_after_s=1.0, retry_after_s_max=10.0, retry_after_jitter_share=0.5)
    told = [known.retry_after_s(60_000.0, 100, 0) for _ in range(50)]
    assert all(10.0 <= s <= 15.0 for s in told)
    assert max(told) - min(told) > 2.0
    soon = forecast(retry_after_jitter_share=0.0).retry_after_s(-5.0, 1, 0)
    assert soon == 1.0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda c: replace(c, engine_wait_share=0.0), "engine_wait_share"),
        (lambda c: replace(c, forecast_share=0.0), "forecast_share"),
        (lambda c: replace(c, retry_after_s_max=0.5), "retry_after_s_max"),
        (lambda c: replace(c, stretch=0.9), "stretch"),
    ],
)
def test_values_that_cannot_be_are_refused(change: Callable[[AdmissionConfig], AdmissionConfig], field: str) -> None:
    with pytest.raises(ValueError, match=field):
        change(AdmissionConfig())


def test_a_tenant_that_floods_and_comes_again_when_told_refuses_nobody_else() -> None:
    fleet = Fleet(FULL)
    door = gate(fleet)
    told = [door.arrive(request(f"a{n}", tenant="a", fingerprint=n + 1), 0).refusal for n in range(400)]
    refused = [r for r in told if r is not None]
    assert len({r.retry_after_s for r in refused}) > 30, "its promises take all the room there is for half a minute"
    assert door.arrive(request("b", tenant="b", fingerprint=1_000), 10 * SECOND).entry is Entry.QUEUED
    assert door.arrive(request("a", tenant="a", fingerprint=1_001), 10 * SECOND).entry is Entry.REFUSED
