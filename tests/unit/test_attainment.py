"""Which requests kept their promises, and how they are counted by class and tenant."""

from __future__ import annotations

from random import Random

import pytest

from policies.attainment import (
    OTHER,
    TENANTS_MAX,
    TENANTS_TOLD,
    UNSERVED_MAX,
    AttainmentMeter,
    Ending,
    Lateness,
    lateness,
)
from policies.config import ObjectivesConfig
from policies.events import Outcome
from policies.measures import ClassCounts, TenantCounts
from policies.types import Priority, Request

MS = 1_000_000
OBJECTIVES = ObjectivesConfig(ttft_ms=1_000, itl_ms=50)


def request(
    tenant: str = "acme",
    *,
    stream: bool = True,
    deadline_ms: int | None = None,
    fingerprint: int = 0,
    priority: Priority = Priority.STANDARD,
) -> Request:
    deadline_ns = None if deadline_ms is None else deadline_ms * MS
    return Request(
        "tg-1", "m", "/v1/completions", tenant, 100, None, (), 64, stream, 0, priority, "", deadline_ns, fingerprint
    )


def answered(ttft_ms: float, e2e_ms: float, tokens: int) -> Ending:
    return Ending(Outcome.SUCCEEDED, "ok", round(e2e_ms * MS), round(ttft_ms * MS), 100, tokens)


def ended(outcome: Outcome, code: str, after_ms: float = 10) -> Ending:
    return Ending(outcome, code, round(after_ms * MS), None, 0, 0)


@pytest.mark.parametrize(
    ("ending", "late"),
    [
        (answered(1_000, 1_500, 11), Lateness()),
        (answered(1_001, 1_400, 11), Lateness(ttft=True)),
        (answered(900, 1_411, 11), Lateness(itl=True)),
        (answered(900, 900, 1), Lateness()),
        (answered(900, 900, 0), Lateness()),
    ],
)
def test_a_stream_is_judged_by_its_first_byte_and_its_mean_gap(ending: Ending, late: Lateness) -> None:
    assert lateness(request(), ending, OBJECTIVES) == late


def test_an_answer_in_one_piece_may_take_as_long_as_a_stream_may() -> None:
    plain = request(stream=False)
    assert not lateness(plain, answered(1_500, 1_500, 11), OBJECTIVES).any
    assert lateness(plain, answered(1_501, 1_501, 11), OBJECTIVES) == Lateness(e2e=True)
    promised = ObjectivesConfig(ttft_ms=1_000, itl_ms=50, e2e_ms=2_000)
    assert not lateness(plain, answered(1_999, 1_999, 11), promised).any
    assert lateness(request(), answered(500, 2_001, 100), promised) == Lateness(e2e=True)


def test_a_deadline_takes_the_place_of_the_classes_objectives() -> None:
    assert not lateness(request(deadline_ms=9_000), answered(8_000, 9_000, 2), OBJECTIVES).any
    assert lateness(request(deadline_ms=100), answered(50, 101, 2), OBJECTIVES) == Lateness(e2e=True)


def test_every_ending_counts_once_and_what_is_nobodys_fault_does_not() -> None:
    meter = AttainmentMeter(lambda _: OBJECTIVES)
    endings = [
        answered(10, 20, 2),
        answered(2_000, 2_010, 2),
        ended(Outcome.REFUSED, "overloaded"),
        ended(Outcome.REFUSED, "tenant_request_rate"),
        ended(Outcome.FAILED, "upstream_failed"),
        ended(Outcome.FAILED, "engine_client_error"),
        ended(Outcome.CANCELLED, "client_gone", 999),
        ended(Outcome.CANCELLED, "client_gone", 1_001),
    ]
    for ending in endings:
        meter.arrived(request())
        assert meter.ended(request(), ending) is (ending is endings[0])
    taken = meter.take()
    expected = ClassCounts(7, 2, 1, refused=1, failed=1, abandoned=1, late_ttft=1)
    assert taken.by_class == {"standard": expected}
    assert expected.demand == 5
    assert (taken.met, taken.by_tenant) == (1, {"acme": TenantCounts(8, 2, 1, 1, 204)})
    assert meter.take().by_class == {}


def test_a_request_may_end_in_a_later_window_than_it_came_in() -> None:
    meter = AttainmentMeter(lambda _: OBJECTIVES)
    meter.arrived(request())
    assert meter.take().by_class == {"standard": ClassCounts(1)}
    meter.ended(request(), ended(Outcome.REFUSED, "tenant_budget"))
    assert meter.take().by_class == {"standard": ClassCounts(0)}


def test_objectives_are_asked_for_again_in_each_window() -> None:
    promised = [OBJECTIVES]
    meter = AttainmentMeter(lambda _: promised[0])
    assert meter.ended(request(), answered(500, 510, 2))
    promised[0] = ObjectivesConfig(ttft_ms=100)
    meter.take()
    assert not meter.ended(request(), answered(500, 510, 2))


def test_only_bodies_that_were_not_served_make_a_repetition() -> None:
    meter = AttainmentMeter(lambda _: OBJECTIVES)
    meter.ended(request(fingerprint=1), ended(Outcome.REFUSED, "queue_full"))
    meter.ended(request(fingerprint=2), answered(1, 2, 2))
    meter.ended(request(fingerprint=0), ended(Outcome.FAILED, "timeout"))
    for fingerprint in (0, 1, 1, 2, 3):
        meter.arrived(request(fingerprint=fingerprint))
    assert meter.take().repeats == 2
    meter.ended(request(fingerprint=1), answered(1, 2, 2))
    meter.arrived(request(fingerprint=1))
    assert meter.take().repeats == 0


def test_memory_is_bounded_whatever_comes() -> None:
    meter, rng = AttainmentMeter(lambda _: OBJECTIVES), Random(1)
    for i in range(2 * UNSERVED_MAX):
        one = request(f"t{rng.randrange(4 * TENANTS_MAX)}", fingerprint=i + 1)
        meter.arrived(one)
        meter.ended(one, ended(Outcome.REFUSED, "queue_full"))
    assert len(meter._unserved) == UNSERVED_MAX
    assert len(meter._tenants) <= TENANTS_MAX + 1
    told = meter.take().by_tenant
    assert len(told) == TENANTS_TOLD + 1
    assert sum(t.arrivals for t in told.values()) == 2 * UNSERVED_MAX
    assert told[OTHER].refused > max(t.refused for name, t in told.items() if name != OTHER)


def test_the_largest_tenants_are_told_by_name() -> None:
    meter = AttainmentMeter(lambda _: OBJECTIVES)
    for i in range(TENANTS_TOLD + 3):
        for _ in range(i + 1):
            one = request(f"t{i:02d}")
            meter.arrived(one)
            meter.ended(one, answered(1, 2, 10))
    told = meter.take().by_tenant
    assert sorted(told) == sorted([OTHER, *(f"t{i:02d}" for i in range(3, TENANTS_TOLD + 3))])
    assert told[OTHER] == TenantCounts(6, 6, 6, 0, 660)
