"""Profiles from request logs: the driver, what a fit recovers, what is refused, and the logged set-ups themselves."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from autoscaling.simulator.fit import FitError
from autoscaling.simulator.fit_log import (
    LoggedRequest,
    Statistics,
    fit_log,
    law_from_series,
    log_metrics,
    parse_request_log,
    parse_statistics,
    replay_log,
)
from autoscaling.simulator.spec import EngineProfile, StepLaw
from autoscaling.simulator.workload.trace import TraceError
from deployments.simulation.profile_files import load_profile
from tests.bench.sim_accuracy import BARS, POINTS, SETUPS, STEP_BAR, read_log, read_points, read_steps
from tests.data import data_file
from tests.sim.closed_loop import closed_loop

TRUTH = EngineProfile(
    "truth", "X", 1, "m", StepLaw(12.0, 0.1, 0.08, 0.04, 1.5), 60_000, 8_192, 1.0, 1.0, "made up",
    step_tokens_max=1_024, running_seqs_max=48, async_scheduling=True,
)  # fmt: skip


def asked(count: int, seed: int, rate_per_s: float = 6.0) -> list[LoggedRequest]:
    """Requests without answers."""
    rng, now_ms, out = Random(f"{seed}/asked"), 0.0, []
    for _ in range(count):
        now_ms += rng.expovariate(rate_per_s / 1e3)
        out.append(LoggedRequest(rng.randint(20, 3_000), rng.randint(2, 250), now_ms, now_ms, now_ms))
    return out


def logged(profile: EngineProfile, count: int = 60, seed: int = 1) -> list[LoggedRequest]:
    return replay_log(profile, asked(count, seed)).requests


# --- the driver -------------------------------------------------------------------------------------------------------


def test_one_request_takes_its_steps() -> None:
    """A prompt of two chunks, then nine decode steps, each a token longer than the one before."""
    profile = replace(TRUTH, request_overhead_ms=7.0, first_token_overhead_ms=3.0)
    law, log = profile.law, [LoggedRequest(1_500, 10, 500.0, 500.0, 500.0)]
    made = replay_log(profile, log).requests[0]
    first_ms = law.step_ms(1, 0, 1_024, 1_024 * 512) + law.step_ms(1, 1_024, 476, 476 * (1_024 + 238))
    assert made.ttft_ms == pytest.approx(7 + first_ms + 3, abs=1e-3)
    decode_ms = sum(law.step_ms(1, 1_500 + i) for i in range(9))
    assert made.last_ms - made.first_ms == pytest.approx(decode_ms, abs=1e-3)
    assert made.tpot_ms == pytest.approx(decode_ms / 9, abs=1e-3)
    assert made.e2e_ms == pytest.approx(made.last_ms - 500)


def test_the_same_log_gives_the_same_run_in_the_logs_order() -> None:
    log = asked(60, 2)
    first, second = replay_log(TRUTH, log), replay_log(TRUTH, log)
    assert first == second
    assert [r.arrival_ms for r in first.requests] == [r.arrival_ms for r in log]
    backwards = replay_log(TRUTH, log[::-1])
    assert backwards.requests == first.requests[::-1], "a log need not be sorted"
    assert 0 < first.running_max <= 48
    assert 0 < first.kv_share_max <= 1


def test_too_small_a_cache_shows_as_preemptions() -> None:
    log = asked(60, 3, rate_per_s=20)
    assert replay_log(replace(TRUTH, kv_tokens=1_000_000), log).preemptions == 0
    starved = replay_log(replace(TRUTH, kv_tokens=8_000), log)
    assert starved.preemptions > 0
    assert starved.kv_share_max > 0.9


def test_a_request_that_does_not_fit_is_told() -> None:
    with pytest.raises(FitError, match="request 2 of the log does not fit truth"):
        replay_log(TRUTH, [LoggedRequest(10, 2, 0, 1, 2), LoggedRequest(9_000, 2, 5, 6, 7)])


# --- fits -------------------------------------------------------------------------------------------------------------


def test_a_fit_recovers_the_law_behind_a_log() -> None:
    truth = replace(TRUTH, law=replace(TRUTH.law, jitter_share=0.03))
    log = logged(truth)
    start = replace(TRUTH, law=StepLaw(17.0, 0.07, 0.05, 0.06, 1.0))
    before = log_metrics(replay_log(start, log).requests)
    found = fit_log(start, log)
    made, real = log_metrics(replay_log(found.profile, log).requests), log_metrics(log)
    assert abs(before["tpot_mean_ms"] / real["tpot_mean_ms"] - 1) > 0.2, "the start was off"
    for key, value in real.items():
        assert made[key] == pytest.approx(value, rel=0.08 if "ttft" in key else 0.03), key
    for running, kv_tokens, prefill in ((1, 1_000, 0), (16, 30_000, 0), (40, 50_000, 0), (16, 30_000, 1_000)):
        wanted = truth.law.step_ms(running, kv_tokens, prefill)
        assert found.profile.law.step_ms(running, kv_tokens, prefill) == pytest.approx(wanted, rel=0.06)
    assert found.profile == replace(start, law=found.profile.law), "nothing but the law is fitted"


def test_a_fit_to_the_first_half_holds_for_the_second() -> None:
    log = logged(TRUTH, 80, seed=4)
    start = replace(TRUTH, law=StepLaw(9.0, 0.14, 0.08, 0.03, 1.5))
    found = fit_log(start, log, 40)
    made = log_metrics(replay_log(found.profile, log).requests[40:])
    for key, value in log_metrics(log[40:]).items():
        assert made[key] == pytest.approx(value, rel=0.08 if "ttft" in key else 0.03), key


def test_a_batch_table_is_fitted_point_by_point_and_never_falls() -> None:
    truth = replace(TRUTH, law=replace(TRUTH.law, batch=((1, 6.0), (8, 14.0), (32, 19.0))))
    log = logged(truth, 50, seed=5)
    start = replace(truth, law=replace(truth.law, batch=((1, 9.0), (8, 11.0), (32, 12.0))))
    law = fit_log(start, log).profile.law
    assert [running for running, _ in law.batch] == [1, 8, 32]
    assert [ms for _, ms in law.batch] == sorted(ms for _, ms in law.batch)
    real, made = log_metrics(log), log_metrics(replay_log(replace(truth, law=law), log).requests)
    assert made["tpot_mean_ms"] == pytest.approx(real["tpot_mean_ms"], rel=0.03)
    assert made["e2e_p50_ms"] == pytest.approx(real["e2e_p50_ms"], rel=0.05)


def test_overhead_is_fitted_where_the_profile_has_one() -> None:
    truth = replace(TRUTH, request_overhead_ms=30.0)
    log = replay_log(truth, asked(20, 6, rate_per_s=1.5)).requests
    found = fit_log(replace(truth, request_overhead_ms=15.0), log)
    assert found.profile.request_overhead_ms == pytest.approx(30.0, rel=0.25)
    with pytest.raises(FitError, match="21 requests to fit to, the log has 20"):
        fit_log(truth, log, 21)


def test_statistics_alone_give_a_law() -> None:
    """Seconds of an engine that obeys the law, put together from it."""
    law, rng, series = TRUTH.law, Random("0/series"), []
    for second in range(60):
        running = rng.randint(4, 48)
        kv_share = rng.uniform(0.2, 0.9)
        prefill = rng.choice((0, 300))
        step_s = law.step_ms(running, round(kv_share * TRUTH.kv_tokens), prefill) / 1e3
        series.append(Statistics((second + 1) * 1e3, prefill / step_s, running / step_s, running, kv_share))
    found = law_from_series(series, [], replace(TRUTH, law=replace(law, a_ms=1.0, b_ms=1.0, d_ms=1.0)))
    assert found.c_ms == law.c_ms
    for running, prefill in ((8, 0), (40, 0), (24, 300)):
        assert found.step_ms(running, 30_000, prefill) == pytest.approx(law.step_ms(running, 30_000, prefill), rel=0.1)


# --- files ------------------------------------------------------------------------------------------------------------

HEADER = "request_id,input_tokens,output_tokens,arrival_s,queued_s,scheduled_s,first_token_s,last_token_s"


def test_a_log_is_read_and_sorted() -> None:
    lines = [HEADER + "\n", "a,10,3,1.5,1.5,1.5,1.75,2.0\n", "\n", "b,20,1,0.5,0.5,0.5,1.0,1.0\n"]
    assert parse_request_log(lines, "r.csv") == [
        LoggedRequest(20, 1, 500, 1_000, 1_000), LoggedRequest(10, 3, 1_500, 1_750, 2_000),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "r.csv: no row in it"),
        ([HEADER], "r.csv: no row in it"),
        (["input_tokens,output_tokens"], "r.csv:1: no column 'arrival_s'"),
        ([HEADER + ",colour"], "r.csv:1: unknown column 'colour'"),
        ([HEADER, "a,10,3,1.5"], "r.csv:2: 4 cells, the header has 8"),
        ([HEADER, "a,10,3,1.5,1,1,x,2.0"], "r.csv:2: first_token_s must be a number, is 'x'"),
        ([HEADER, "a,10,3,-1.5,1,1,1,2.0"], "r.csv:2: arrival_s must be finite and not negative"),
        ([HEADER, "a,10,3,1.5,1,1,nan,2.0"], "r.csv:2: first_token_s must be finite"),
        ([HEADER, "a,0,3,1.5,1,1,1.6,2.0"], "r.csv:2: input_tokens and output_tokens must be whole and at least 1"),
        ([HEADER, "a,10.5,3,1.5,1,1,1.6,2.0"], "r.csv:2: input_tokens and output_tokens must be whole"),
        ([HEADER, "a,10,3,1.5,1,1,1.2,2.0"], "r.csv:2: arrival_s, first_token_s and last_token_s must not go back"),
    ],
)
def test_a_bad_log_is_told_with_its_line(lines: list[str], words: str) -> None:
    with pytest.raises(TraceError) as error:
        parse_request_log(lines, "r.csv")
    assert words in str(error.value)


def test_statistics_are_read() -> None:
    lines = ["t,prompt_throughput,gen_throughput,running,waiting,kv_cache_pct", "1.0,3392.0,2.0,5,2,13.22"]
    assert parse_statistics(lines, "s.csv") == [Statistics(1_000, 3_392, 2, 5, 0.1322)]


# --- measured engines -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setup", SETUPS, ids=[setup.profile for setup in SETUPS])
def test_the_logged_engines_are_met_within_the_bars(setup: object) -> None:
    found = next(s for s in SETUPS if s is setup)
    data_file(f"calib/vllm019_{found.log}_requests.csv")
    log = read_log(found.log)
    made = log_metrics(replay_log(load_profile(found.profile), log).requests)
    for key, value in log_metrics(log).items():
        if key in BARS:
            assert abs(made[key] / value - 1) <= BARS[key], key


def test_measured_step_times_are_met_within_the_bar() -> None:
    data_file("calib/blis_vllm_h100_step_cycle.csv")
    from autoscaling.simulator.fit import fit_steps

    for name, steps in read_steps().items():
        assert fit_steps(steps).held_out.mean_share <= STEP_BAR, name


@pytest.mark.parametrize(("name", "model", "system", "tp"), POINTS)
def test_published_serving_points_are_met(name: str, model: str, system: str, tp: int) -> None:
    """ISL/OSL 1024/1024 at 4, 16 and 64 streams: TPOT within 5 %, TTFT within 35 %."""
    data_file("calib/aic_silicon_sample_agg.csv.gz")
    points = [p for p in read_points(model, system, tp) if p[:2] == (1_024, 1_024) and p[2] in {4, 16, 64}]
    assert len(points) == 3
    for prompt, output, streams, ttft_ms, tpot_ms in points:
        made = closed_loop(load_profile(name), prompt, output, streams)
        assert made.tpot_ms == pytest.approx(tpot_ms, rel=0.05)
        assert made.ttft_ms == pytest.approx(ttft_ms, rel=0.35)
