from __future__ import annotations

import random

import pytest

from policies.config import ClassConfig, ClassesConfig, ObjectivesConfig, PolicyConfig
from policies.control.burn import LONG, MIDDLE, SECOND_NS, SHORT, SLIS, SPANS, Burn, BurnMeter, Window, above
from policies.control.conditions_slo import BURN_FAST, limit_of
from policies.measures import ClassCounts
from policies.types import LATENCY_BOUNDS_MS
from tests.unit.control.fleet import gateway_report, histogram


def meter_after(seconds: int, counts: ClassCounts, config: PolicyConfig | None = None) -> BurnMeter:
    meter = BurnMeter(config or PolicyConfig())
    for second in range(1, seconds + 1):
        meter.receive(gateway_report(seq=second, by_class={"standard": counts}))
        meter.step(second * SECOND_NS)
    return meter


def burn(meter: BurnMeter, sli: str, window: int) -> Burn:
    return meter.burns(window)[SLIS.index(sli)]


def test_a_window_is_what_was_counted_within_it_whatever_came_and_went() -> None:
    rng = random.Random(3)
    window, kept, now_ns = Window(60, 10, 2), [], 0
    for _ in range(2_000):
        now_ns += rng.randrange(3 * SECOND_NS)
        counts = [rng.randrange(5), rng.randrange(5)]
        kept.append((now_ns // (10 * SECOND_NS), counts))
        window.add(counts, now_ns)
        inside = [c for at, c in kept if at > now_ns // (10 * SECOND_NS) - 6]
        assert window.sums == [sum(c[0] for c in inside), sum(c[1] for c in inside)]
        assert len(window) <= 6


def test_burn_is_the_share_that_missed_over_the_share_that_may() -> None:
    meter = meter_after(4, ClassCounts(arrivals=10, succeeded=8, met=5, refused=2, late_ttft=2, late_itl=1, failed=0))
    ttft = burn(meter, "standard/ttft", SHORT)
    assert (ttft.missed, ttft.counted) == (16, 40)
    assert ttft.burn == pytest.approx(0.4 / 0.05)
    assert burn(meter, "standard/itl", SHORT).burn == pytest.approx(1 / 8 / 0.05)
    assert burn(meter, "standard/availability", SHORT).burn == 0
    assert burn(meter, "interactive/ttft", SHORT).counted == 0
    worst = meter.worst("ttft", MIDDLE)
    assert worst is not None
    assert worst.sli == "standard/ttft"
    assert meter.worst("e2e", LONG) == burn(meter, "standard/e2e", LONG)


def test_windows_forget_after_their_own_time() -> None:
    meter = meter_after(30, ClassCounts(arrivals=1, succeeded=1, late_ttft=1))
    for second in range(31, 800):
        meter.receive(gateway_report(seq=second, by_class={"standard": ClassCounts(arrivals=1, succeeded=1, met=1)}))
        meter.step(second * SECOND_NS)
        if second == 36:
            assert burn(meter, "standard/ttft", SHORT).missed == 0
            assert burn(meter, "standard/ttft", MIDDLE).missed == 30
        if second == 95:
            assert burn(meter, "standard/ttft", MIDDLE).missed == 0
            assert burn(meter, "standard/ttft", LONG).missed == 30
    assert burn(meter, "standard/ttft", LONG).missed == 0
    assert all(len(w) <= span // bucket for w, (span, bucket) in zip(meter._windows, SPANS, strict=True))


def test_time_before_the_first_report_counts_as_time_without_a_miss() -> None:
    meter = meter_after(12, ClassCounts(arrivals=1, succeeded=1, late_ttft=1))
    assert burn(meter, "standard/ttft", SHORT).spent == pytest.approx(20.0)
    assert burn(meter, "standard/ttft", MIDDLE).spent == pytest.approx(20.0 * 12 / 60)
    assert burn(meter, "standard/ttft", LONG).spent == pytest.approx(20.0 * 12 / 720)


def test_classes_have_budgets_of_their_own() -> None:
    classes = ClassesConfig(standard=ClassConfig(quantile=0.5, availability=0.9))
    config = PolicyConfig(objectives=ObjectivesConfig(quantile=0.99), classes=classes)
    meter = meter_after(1, ClassCounts(arrivals=9, succeeded=8, late_e2e=4, failed=1), config)
    assert burn(meter, "standard/e2e", SHORT).burn == pytest.approx(1.0)
    assert burn(meter, "standard/availability", SHORT).burn == pytest.approx(1 / 9 / 0.1)
    assert burn(meter, "batch/e2e", SHORT).budget == pytest.approx(0.01)


def test_a_wide_budget_can_still_burn_fast() -> None:
    wide = Burn("all/ttft", 2.0, 10, 10, 0.5)
    assert limit_of(wide, BURN_FAST) == pytest.approx(1.5)
    assert limit_of(wide._replace(budget=0.05), BURN_FAST) == BURN_FAST


def test_reports_without_classes_are_judged_by_their_histograms() -> None:
    meter = BurnMeter(PolicyConfig(objectives=ObjectivesConfig(e2e_ms=5_000.0)))
    meter.receive(gateway_report(ttft=histogram(100, 4_000), itl=histogram(10, 20, 30, 400), e2e=histogram(9_000.0)))
    meter.step(SECOND_NS)
    assert burn(meter, "all/ttft", SHORT).share == pytest.approx(0.5)
    assert burn(meter, "all/itl", SHORT).share == pytest.approx(0.25)
    assert burn(meter, "all/e2e", SHORT).share == pytest.approx(1.0)


def test_a_window_in_which_nothing_ended_is_no_gateway_without_classes() -> None:
    meter = meter_after(3, ClassCounts(arrivals=1, succeeded=1, met=1))
    meter.receive(gateway_report(seq=4, ttft=histogram(9_000), itl=histogram(10)))
    meter.step(4 * SECOND_NS)
    assert burn(meter, "all/ttft", SHORT).counted == 0


def test_values_above_a_limit_by_interpolation() -> None:
    assert above(histogram(100, 200, 300), 200.0) == 1
    assert above(histogram(250, 250), 275.0) == pytest.approx(0.5)
    assert above(histogram(1e9), LATENCY_BOUNDS_MS[-1] * 2) == 1
    assert above(histogram(), 10.0) == 0
