"""Sums that are kept while reports come and go, against the same sums made anew from the window of each tick."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.config import ControlConfig
from policies.control.signals import ReplicaSignals, SignalBook, Signals, Traffic, Work
from policies.control.windows import WINDOW_MS, WINDOW_REPORTS_MAX
from policies.measures import ClassCounts, TenantCounts
from policies.types import LATENCY_BOUNDS_MS, GatewayReport, Histogram, Priority, ReplicaReport, ReplicaState
from tests.examples import examples
from tests.unit.control.fleet import gateway_report, replica_report

MS = 1_000_000
CONFIG = ControlConfig()

RATES = {
    "arrivals_ps": "arrivals", "routed_ps": "routed", "failed_ps": "failed", "prompt_tps": "prompt_tokens",
    "output_tps": "output_tokens", "succeeded_ps": "succeeded", "routed_prompt_tps": "predicted_prompt_tokens",
    "met_ps": "met", "retries_ps": "retries", "repeats_ps": "repeats", "tasks_succeeded_ps": "tasks_succeeded",
    "tasks_failed_ps": "tasks_failed",
}  # fmt: skip

CLASS_FIELDS = ("arrivals", "succeeded", "met", "refused", "failed", "abandoned", "late_ttft")
TENANT_FIELDS = ("arrivals", "succeeded", "met", "refused", "tokens")

Stream = list[tuple[int, ReplicaReport | GatewayReport]]
"""Accepted reports of one reporter with the time of their receipt, since its last new life."""


def histogram(rng: Random) -> Histogram:
    counts = tuple(rng.choice((0, 0, 0, rng.randrange(50))) for _ in range(len(LATENCY_BOUNDS_MS) + 1))
    return Histogram(counts, rng.uniform(0, 1e5) if any(counts) else 0.0)


def a_replica(rng: Random, name: str, seq: int) -> ReplicaReport:
    counts = {key: rng.randrange(1_000) for key in ("prefill_tokens", "decode_tokens", "preemptions", "steps")}
    query = rng.randrange(1_000)
    held = {key: rng.randrange(50) for key in ("running", "waiting", "http_inflight", "kv_tokens_used")}
    return replica_report(
        name, seq, window_ms=rng.uniform(500, 1_500), itl=histogram(rng), prefix_query_tokens=query,
        prefix_hit_tokens=rng.randrange(query + 1), busy_share=rng.choice((None, rng.random())),
        kv_tokens_max=rng.choice((0, 1_000)), gpu_utilisation_share=rng.choice((None, rng.random())),
        model="n" if name == "r0" and rng.random() < 0.1 else "m", **held, **counts,
        state=rng.choice((ReplicaState.READY, ReplicaState.READY, ReplicaState.DRAINING, ReplicaState.STUCK)),
    )  # fmt: skip


def a_gateway(rng: Random, name: str, seq: int) -> GatewayReport:
    by_replica = {key: {f"r{i}": rng.randrange(100) for i in range(rng.randrange(4))} for key in (
        "routed", "predicted_prompt_tokens", "predicted_hit_tokens", "failed",
    )}  # fmt: skip
    counts = {key: rng.randrange(1_000) for key in ("arrivals", "succeeded", "prompt_tokens", "output_tokens")}
    counts |= {key: rng.randrange(100) for key in ("met", "retries", "repeats", "tasks_succeeded", "tasks_failed")}
    histograms = {key: histogram(rng) for key in ("ttft", "itl", "e2e", "ttft_error_ms")}
    by_class = {p.value: ClassCounts(*[rng.randrange(9) for _ in range(9)]) for p in Priority if rng.random() < 0.5}
    tenants = rng.sample(["a", "b", "c", "other"], rng.randrange(4))
    by_tenant = {t: TenantCounts(*[rng.randrange(9) for _ in range(5)]) for t in tenants}
    return gateway_report(
        name, seq, window_ms=rng.uniform(500, 1_500), by_class=by_class, by_tenant=by_tenant,
        **by_replica, **counts, **histograms,
    )  # fmt: skip


def merged(histograms: Iterable[Histogram]) -> Histogram:
    result = Histogram()
    for h in histograms:
        result = result.plus(h)
    return result


def same(one: Histogram, other: Histogram) -> None:
    """Counts are exact, times to the ns."""
    assert one.counts == other.counts
    assert one.sum_ms == pytest.approx(other.sum_ms)


def window(stream: Stream, now_ns: int) -> list[ReplicaReport | GatewayReport]:
    return [r for at_ns, r in stream[-WINDOW_REPORTS_MAX:] if (now_ns - at_ns) / 1e6 <= WINDOW_MS]


def check_replica(signals: ReplicaSignals, stream: Stream, now_ns: int) -> None:
    reports = [r for r in window(stream, now_ns) if isinstance(r, ReplicaReport)]
    assert [s.value for s in signals.window] == reports
    assert signals.window_ms == pytest.approx(sum(r.window_ms for r in reports))
    seconds = signals.window_ms / 1000 or 1.0
    assert signals.prefill_tps == pytest.approx(sum(r.prefill_tokens for r in reports) / seconds)
    assert signals.decode_tps == pytest.approx(sum(r.decode_tokens for r in reports) / seconds)
    for field in ("prefix_query_tokens", "prefix_hit_tokens", "preemptions", "steps"):
        assert getattr(signals, field) == sum(getattr(r, field) for r in reports)
    same(signals.itl, merged(r.itl for r in reports))
    busy = [(r.busy_share, r.window_ms) for r in reports if r.busy_share is not None]
    assert signals.busy_share == (
        pytest.approx(sum(b * w for b, w in busy) / sum(w for _, w in busy)) if busy else None
    )
    assert signals.age_ms == (now_ns - stream[-1][0]) / 1e6
    assert signals.fresh is (signals.age_ms <= CONFIG.report_age_ms_max)


def check_work(work: Work | None, fresh: Sequence[ReplicaSignals], unknown: int) -> None:
    """The columns' sums against those over the replicas one by one: equal to the last digit, in whatever order."""
    if not fresh:
        assert work is None
        return
    assert work is not None
    latest = [r.latest for r in fresh]
    for figure in ("running", "waiting", "http_inflight", "kv_tokens_used", "kv_tokens_max"):
        assert getattr(work, figure) == sum(getattr(report, figure) for report in latest), figure
    for figure in ("prefill_tps", "decode_tps", "prefix_query_tokens", "prefix_hit_tokens", "preemptions"):
        assert getattr(work, figure) == sum(getattr(r, figure) for r in fresh), figure
    assert work.itl.counts == merged(r.itl for r in fresh).counts
    assert work.itl.sum_ms == sum(r.itl.sum_ms for r in fresh)
    shares = [r.kv_tokens_used / r.kv_tokens_max for r in latest if r.kv_tokens_max]
    assert work.kv_share_max == max(shares, default=None)
    assert work.busy_share == mean([r.busy_share for r in fresh])
    assert work.gpu_utilisation_share == mean([r.gpu_utilisation_share for r in latest])
    assert work.confidence == sum(r.confidence for r in fresh) / (len(fresh) + unknown)
    assert work.age_ms == max(r.age_ms for r in fresh)


def mean(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def check_fleet(signals: Signals) -> None:
    """What the fleet comes to, and each of its models."""
    replicas, stays = signals.replicas, [r for r in signals.replicas if r.latest.state is not ReplicaState.DRAINING]
    assert signals.ids == tuple(r.replica_id for r in replicas) == tuple(sorted(signals.ids))
    assert signals.fresh == tuple(r for r in replicas if r.fresh)
    assert signals.serving == tuple(r for r in replicas if r.serving)
    assert signals.serving_ids == tuple(r.replica_id for r in replicas if r.serving)
    assert signals.preempting == tuple(i for i, r in enumerate(replicas) if r.latest.preemptions)
    assert signals.unknown_replicas == sum(not r.fresh for r in stays)
    check_work(signals.work, signals.fresh, signals.unknown_replicas)
    for name, model in signals.by_model.items():
        own = [r for r in replicas if r.latest.model == name]
        assert model.replicas == len(own)
        silent = sum(not r.fresh for r in stays if r.latest.model == name)
        check_work(model.work, [r for r in own if r.fresh], silent)


def check_traffic(traffic: Traffic, streams: Sequence[Stream], now_ns: int) -> None:
    windows = [[r for r in window(s, now_ns) if isinstance(r, GatewayReport)] for s in streams]

    def rate(of: str) -> float:
        total = 0.0
        for reports in windows:
            values = [getattr(r, of) for r in reports]
            count = sum(v if isinstance(v, int) else sum(v.values()) for v in values)
            total += count / (sum(r.window_ms for r in reports) / 1000 or 1.0)
        return total

    every = [r for reports in windows for r in reports]
    for figure, of in RATES.items():
        assert getattr(traffic, figure) == pytest.approx(rate(of)), figure
    assert traffic.predicted_prompt_tokens == sum(sum(r.predicted_prompt_tokens.values()) for r in every)
    assert traffic.predicted_hit_tokens == sum(sum(r.predicted_hit_tokens.values()) for r in every)
    same(traffic.ttft, merged(r.ttft for r in every))
    same(traffic.itl, merged(r.itl for r in every))
    same(traffic.e2e, merged(r.e2e for r in every))
    same(traffic.ttft_error, merged(r.ttft_error_ms for r in every))
    check_named(traffic.by_class, windows, lambda r: r.by_class, CLASS_FIELDS)
    check_named(traffic.by_tenant, windows, lambda r: r.by_tenant, TENANT_FIELDS)
    assert traffic.demand_ps == pytest.approx(sum(c.demand_ps for c in traffic.by_class.values()))


def check_named(
    found: Mapping[str, Any],
    windows: Sequence[Sequence[GatewayReport]],
    of: Callable[[GatewayReport], Mapping[str, Any]],
    fields: Sequence[str],
) -> None:
    """Rates by class or tenant; those without any count are left out."""
    expected: dict[str, list[float]] = {}
    for reports in windows:
        seconds = sum(r.window_ms for r in reports) / 1000 or 1.0
        for report in reports:
            for name, counts in of(report).items():
                row = [getattr(counts, field) / seconds for field in fields]
                expected[name] = [a + b for a, b in zip(expected.get(name, [0.0] * len(row)), row, strict=True)]
    assert found.keys() == {name for name, row in expected.items() if any(row)}
    for name, rates in found.items():
        assert dataclasses.astuple(rates) == pytest.approx(tuple(expected[name])), name


@settings(max_examples=examples(15), deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_kept_sums_are_those_of_the_window(seed: int, reporters: int) -> None:
    rng = Random(seed)
    book, now_ns = SignalBook(CONFIG), 0
    earlier: tuple[ReplicaSignals, ...] = ()
    ages: list[float] = []
    streams: dict[str, Stream] = {f"{kind}{i}": [] for kind in "rg" for i in range(reporters)}
    for _ in range(50):
        now_ns += rng.choice((0, 200 * MS, 1_000 * MS, 1_000 * MS, 1_000 * MS, 4_000 * MS, 14_000 * MS, 40_000 * MS))
        for name, stream in streams.items():
            if rng.random() < 0.1:
                continue
            last = stream[-1][1].seq if stream else 0
            seq = max(1, last + rng.choice((1, 1, 1, 3, 0, -5)))
            report: ReplicaReport | GatewayReport
            if name.startswith("r"):
                report = a_replica(rng, name, seq)
                kept = book.receive_replica(report, now_ns)
            else:
                report = a_gateway(rng, name, seq)
                kept = book.receive_gateway(report, now_ns)
            if kept:
                if seq <= last:
                    stream.clear()
                stream.append((now_ns, report))
        now_ns += rng.choice((0, 0, 300 * MS, 2_500 * MS, 11_700 * MS, 13_000 * MS))
        signals = book.signals(now_ns)
        assert [r.age_ms for r in earlier] == ages, "what a tick was told stays as it was"
        earlier, ages = signals.replicas, [r.age_ms for r in signals.replicas]
        for one in signals.replicas:
            check_replica(one, streams[one.replica_id], now_ns)
        check_fleet(signals)
        again = book.signals(now_ns)
        assert (again.replicas, again.work, again.by_model) == (signals.replicas, signals.work, signals.by_model)
        if signals.traffic is not None:
            fresh = [
                s
                for n, s in sorted(streams.items())
                if n.startswith("g") and s and now_ns - s[-1][0] <= CONFIG.report_age_ms_max * MS
            ]
            check_traffic(signals.traffic, fresh, now_ns)
