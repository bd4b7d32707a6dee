"""Age and confidence of signals; what is told by gateway, model, class and tenant."""

from __future__ import annotations

import pytest

from policies.config import ControlConfig
from policies.control.signals import SignalBook
from policies.control.windows import SETTLED_MS
from policies.measures import ClassCounts, TenantCounts
from policies.types import FleetView
from tests.unit.control.fleet import SECOND_NS, gateway_report, replica_report

CONFIG = ControlConfig(report_age_ms_max=5_000, forget_after_ms=60_000)


def at(seconds: float) -> int:
    return int(seconds * SECOND_NS)


def heard(*seconds: float, book: SignalBook | None = None, name: str = "a") -> SignalBook:
    book = book or SignalBook(CONFIG)
    for seq, second in enumerate(seconds, 1):
        book.receive_replica(replica_report(name, seq), at(second))
        book.receive_gateway(gateway_report(name, seq), at(second))
    return book


def confidence(book: SignalBook, seconds: float) -> float:
    (replica,), (gateway,) = book.signals(at(seconds)).replicas, book.signals(at(seconds)).gateways
    assert replica.confidence == pytest.approx(gateway.confidence)
    return replica.confidence


def test_confidence_grows_with_what_a_window_covers_and_is_whole_once_it_is_long_enough() -> None:
    values = [confidence(heard(*range(1, n + 1)), n) for n in range(1, 8)]
    assert values == pytest.approx([min(1.0, n * 1_000 / SETTLED_MS) for n in range(1, 8)])


def test_lost_reports_lower_confidence_by_the_time_they_would_have_covered() -> None:
    complete, gappy = heard(*range(1, 11)), heard(1, 2, 4, 5, 7, 8, 10)
    assert confidence(complete, 10) == 1
    assert confidence(gappy, 10) == pytest.approx(0.7)


def test_confidence_falls_with_age_from_two_periods_on_and_is_nothing_once_stale() -> None:
    book = heard(*range(1, 11))
    assert [confidence(book, 10 + age) for age in (0, 2, 3.5, 5, 5.1)] == pytest.approx([1, 1, 0.5, 0, 0])


def test_of_the_whole_fleet_the_silent_and_the_unknown_count_as_nothing() -> None:
    book = heard(*range(1, 11))
    heard(*range(1, 5), book=book, name="b")  # silent since 4 s
    signals = book.signals(at(10))
    assert signals.work is not None
    assert signals.traffic is not None
    assert signals.work.confidence == pytest.approx(0.5)
    assert signals.traffic.confidence == pytest.approx(0.5)
    assert [(g.gateway_id, g.fresh) for g in signals.gateways] == [("a", True), ("b", False)]
    assert (signals.work.age_ms, signals.traffic.age_ms) == (0, 0)
    book.receive_fleet(FleetView(4, 4, 1, 4), at(10))
    work = book.signals(at(10)).work
    assert work is not None
    assert work.confidence == pytest.approx(0.25)


def test_a_restarted_reporter_earns_its_confidence_anew() -> None:
    book = heard(*range(1, 11))
    book.receive_replica(replica_report("a", 1), at(20))
    (replica,) = book.signals(at(20)).replicas
    assert replica.confidence == pytest.approx(0.2)


def test_classes_and_tenants_add_up_over_gateways() -> None:
    book = SignalBook(CONFIG)
    for name, succeeded in (("g1", 4), ("g2", 6)):
        counts = ClassCounts(10, succeeded, met=2, refused=3, failed=1, abandoned=1, late_ttft=1)
        tenants = {"acme": TenantCounts(10, succeeded, 2, 3, 500), "idle": TenantCounts()}
        report = gateway_report(name, by_class={"batch": counts}, by_tenant=tenants, met=2, retries=4, repeats=5)
        book.receive_gateway(report, at(1))
    traffic = book.signals(at(1)).traffic
    assert traffic is not None
    (batch,) = traffic.by_class.values()
    assert (batch.arrivals_ps, batch.succeeded_ps, batch.met_ps, batch.late_ttft_ps) == (20, 10, 4, 2)
    assert (batch.demand_ps, traffic.demand_ps, batch.met_share) == (20, 20, 0.2)
    assert traffic.by_tenant.keys() == {"acme"}
    assert traffic.by_tenant["acme"].tokens_ps == 1_000
    assert (traffic.met_ps, traffic.retries_ps, traffic.repeats_ps) == (4, 8, 10)


def test_gateways_agree_or_not_on_whom_they_leave_alone() -> None:
    book = SignalBook(CONFIG)
    book.receive_gateway(gateway_report("g1", ejected={"r1": "grey_ttft", "r2": "failures"}), at(1))
    book.receive_gateway(gateway_report("g2", ejected={"r1": "grey_steps"}), at(1))
    book.receive_gateway(gateway_report("g2", 2), at(2))
    traffic = book.signals(at(2)).traffic
    assert traffic is not None
    assert traffic.ejected == {"r1": 1, "r2": 1}


def test_each_model_has_signals_of_its_own() -> None:
    book = SignalBook(CONFIG)
    for second in range(1, 6):
        for model, tokens in (("m", 100), ("n", 40)):
            book.receive_replica(replica_report(f"{model}1", second, model=model, decode_tokens=tokens), at(second))
            book.receive_gateway(gateway_report(f"g-{model}", second, model=model, arrivals=tokens), at(second))
    signals = book.signals(at(5))
    rates = {name: (one.work.decode_tps, one.traffic.arrivals_ps) for name, one in signals.by_model.items()
             if one.work and one.traffic}  # fmt: skip
    assert rates == {"m": (100, 100), "n": (40, 40)}
    assert [one.work.confidence for one in signals.by_model.values() if one.work is not None] == [1, 1]
    assert signals.work is not None
    assert signals.work.decode_tps == 140


def test_with_one_model_its_signals_are_those_of_all() -> None:
    signals = heard(*range(1, 4)).signals(at(3))
    assert signals.by_model["m"].traffic is signals.traffic
    assert signals.by_model["m"].work is signals.work
    assert SignalBook(CONFIG).signals(at(1)).by_model == {}
