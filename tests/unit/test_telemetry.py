"""Metrics of one process: what is exported, what is refused, what is bounded."""

from __future__ import annotations

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from dashboards.catalogue import ALL, LABELS, LATENCY_BUCKETS_S, OTHER, Kind, Metric, Source
from deployments.telemetry import Series, Telemetry, TelemetryError
from policies.types import LATENCY_BOUNDS_MS, Histogram


def _samples(telemetry: Telemetry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = telemetry.render().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_counters_gauges_and_histograms_come_out_as_set() -> None:
    telemetry = Telemetry(Source.GATEWAY)
    telemetry["tidegate_retries_total"].inc(reason="connect")
    telemetry["tidegate_retries_total"].inc(2, reason="connect")
    telemetry["tidegate_inflight_requests"].set(7)
    telemetry["tidegate_ttft_seconds"].observe(0.04, endpoint="/v1/models")
    telemetry["tidegate_ttft_seconds"].observe(1_000, endpoint="/v1/models")
    samples, where = _samples(telemetry), ("endpoint", "/v1/models")
    assert samples["tidegate_retries_total", (("reason", "connect"),)] == 3
    assert samples["tidegate_inflight_requests", ()] == 7
    assert samples["tidegate_ttft_seconds_count", (where,)] == 2
    assert samples["tidegate_ttft_seconds_sum", (where,)] == pytest.approx(1_000.04)
    assert samples["tidegate_ttft_seconds_bucket", (where, ("le", "0.03"))] == 0
    assert samples["tidegate_ttft_seconds_bucket", (where, ("le", "0.05"))] == 1
    assert samples["tidegate_ttft_seconds_bucket", (where, ("le", "600.0"))] == 1
    assert samples["tidegate_ttft_seconds_bucket", (where, ("le", "+Inf"))] == 2


def test_a_value_on_a_bound_falls_into_that_bucket() -> None:
    telemetry = Telemetry(Source.GATEWAY)
    telemetry["tidegate_itl_seconds"].observe(0.05)
    assert _samples(telemetry)["tidegate_itl_seconds_bucket", (("le", "0.05"),)] == 1


def test_unknown_is_nan_and_a_gauge_never_set_is_absent() -> None:
    telemetry = Telemetry(Source.GATEWAY)
    telemetry["tidegate_plan_age_seconds"].set(None)
    samples = _samples(telemetry)
    assert samples["tidegate_plan_age_seconds", ()] != samples["tidegate_plan_age_seconds", ()]
    assert ("tidegate_queued_requests", ()) not in samples


def test_a_counter_without_labels_starts_at_zero() -> None:
    assert _samples(Telemetry(Source.GATEWAY))["tidegate_prompt_tokens_total", ()] == 0


def test_adding_a_histogram_equals_observing_each_value() -> None:
    one, all_at_once = Telemetry(Source.GATEWAY), Telemetry(Source.GATEWAY)
    counts = [0] * (len(LATENCY_BOUNDS_MS) + 1)
    for i, bound_ms in enumerate(LATENCY_BOUNDS_MS):
        counts[i] = i + 1
        for _ in range(i + 1):
            one["tidegate_itl_seconds"].observe(bound_ms / 1_000)
    counts[-1] = 1
    one["tidegate_itl_seconds"].observe(3_600)
    total_ms = sum(n * bound for n, bound in zip(counts, LATENCY_BOUNDS_MS, strict=False)) + 3_600_000
    all_at_once["tidegate_itl_seconds"].add(Histogram(tuple(counts), total_ms))
    expected, got = _samples(one), _samples(all_at_once)
    assert got.keys() == expected.keys()
    for key, value in expected.items():
        assert got[key] == pytest.approx(value), key


def test_an_unknown_name_and_another_process_name_are_refused() -> None:
    telemetry = Telemetry(Source.GATEWAY)
    for name in ("tidegate_no_such_total", "tidegate_control_ticks_total", "requests_total"):
        with pytest.raises(TelemetryError, match=name):
            telemetry[name]


@pytest.mark.parametrize("labels", [{}, {"reason": "x", "more": "y"}, {"endpoint": "x"}])
def test_wrong_labels_are_refused(labels: dict[str, str]) -> None:
    with pytest.raises(TelemetryError, match="takes the labels reason"):
        Telemetry(Source.GATEWAY)["tidegate_retries_total"].inc(1.0, **labels)


def test_a_wrong_kind_and_a_falling_counter_are_refused() -> None:
    telemetry = Telemetry(Source.GATEWAY)
    with pytest.raises(TelemetryError, match="not a gauge"):
        telemetry["tidegate_prompt_tokens_total"].set(1)
    with pytest.raises(TelemetryError, match="not a counter"):
        telemetry["tidegate_inflight_requests"].inc()
    with pytest.raises(TelemetryError, match="not a histogram"):
        telemetry["tidegate_inflight_requests"].observe(1)
    with pytest.raises(TelemetryError, match="not a histogram"):
        telemetry["tidegate_inflight_requests"].add(Histogram())
    with pytest.raises(TelemetryError, match="cannot fall"):
        telemetry["tidegate_prompt_tokens_total"].inc(-1)
    with pytest.raises(TelemetryError, match="no label"):
        telemetry["tidegate_inflight_requests"].remove_where("replica", "r1")


def test_series_of_a_replica_that_left_are_gone_and_others_stay() -> None:
    telemetry = Telemetry(Source.CONTROLLER)
    for replica in ("a", "b"):
        telemetry["tidegate_replica_running_seqs"].set(1, replica=replica)
        telemetry["tidegate_replica_knob"].set(4, replica=replica, knob="step_tokens_max")
        telemetry["tidegate_replica_preemptions_total"].inc(replica=replica)
    telemetry.remove_replica("a")
    text = telemetry.render().decode()
    assert 'replica="a"' not in text
    assert text.count('replica="b"') == 3
    assert telemetry["tidegate_replica_running_seqs"].values_of("replica") == {"b"}


def test_label_values_beyond_the_bound_are_counted_as_other() -> None:
    telemetry = Telemetry(Source.GATEWAY)
    most = LABELS["reason"].values_max
    for i in range(most + 10):
        telemetry["tidegate_routed_total"].inc(reason=f"r{i}")
    samples = {k: v for k, v in _samples(telemetry).items() if k[0] == "tidegate_routed_total"}
    assert len(samples) == most + 1
    assert samples["tidegate_routed_total", (("reason", OTHER),)] == 10


def test_label_sets_beyond_the_bound_are_counted_as_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dashboards.catalogue.SERIES_MAX", 5)
    series = Series(Metric("tidegate_x_total", Kind.COUNTER, Source.GATEWAY, ("lever", "reason"), "", "Help."))
    for i in range(4):
        for j in range(4):
            series.inc(lever=str(i), reason=str(j))
    (family,) = series.collect()
    assert len(family.samples) == 6
    assert sum(sample.value for sample in family.samples) == 16


def test_a_removed_replica_makes_room_for_another() -> None:
    series = Telemetry(Source.CONTROLLER)["tidegate_replica_running_seqs"]
    for i in range(LABELS["replica"].values_max):
        series.set(i, replica=f"r{i}")
    series.remove_where("replica", "r0")
    series.set(1, replica="new")
    assert "new" in series.values_of("replica")


def test_two_telemetries_and_the_default_registry_are_apart() -> None:
    one, two = Telemetry(Source.GATEWAY), Telemetry(Source.GATEWAY)
    one["tidegate_prompt_tokens_total"].inc(5)
    assert _samples(two)["tidegate_prompt_tokens_total", ()] == 0
    assert not any(family.name.startswith("tidegate_") for family in REGISTRY.collect())


def test_each_source_exports_its_own_metrics_only() -> None:
    for source in Source:
        families = {f.name for f in text_string_to_metric_families(Telemetry(source).render().decode())}
        assert families == {m.name.removesuffix("_total") for m in ALL if m.source is source}


def test_buckets_of_the_export_are_the_catalogue_s() -> None:
    telemetry = Telemetry(Source.GATEWAY)
    telemetry["tidegate_itl_seconds"].observe(1)
    bounds = [k[1][0][1] for k in _samples(telemetry) if k[0] == "tidegate_itl_seconds_bucket"]
    assert bounds == [*(str(bound) for bound in LATENCY_BUCKETS_S), "+Inf"]
