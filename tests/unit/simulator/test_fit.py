"""Step laws from steps: known coefficients come back from noise, outliers move nothing, bad input is told."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest

from autoscaling.simulator.fit import (
    FitError,
    StepSample,
    batch_knots,
    fit_steps,
    law_from_coefficients,
    parse_steps,
    step_errors,
)
from autoscaling.simulator.least_squares import minimise, not_negative, solve
from autoscaling.simulator.spec import StepLaw
from autoscaling.simulator.workload.trace import TraceError
from policies.types import StepCoefficients

TRUTH = StepLaw(12.0, 0.08, 0.06, 0.03, 1.2)


def steps_of(law: StepLaw, count: int, seed: int, noise: float = 0.0, running_max: int = 128) -> list[StepSample]:
    rng = Random(f"{seed}/steps")
    out = []
    for _ in range(count):
        running, prefill, start = rng.randint(1, running_max), 0, 0
        if rng.random() < 0.3:
            prefill, start = rng.randint(16, 2_048), rng.choice((0, 2_048))
        kv_tokens, pairs = running * rng.randint(100, 4_000), prefill * (start + prefill / 2)
        ms = law.step_ms(running, kv_tokens, prefill, pairs) * (1 + noise * rng.gauss(0, 1))
        out.append(StepSample(running, kv_tokens, prefill, ms, pairs))
    return out


def test_known_coefficients_come_back() -> None:
    law = fit_steps(steps_of(TRUTH, 300, 1)).law
    for name in ("a_ms", "b_ms", "c_ms", "d_ms", "e_ms"):
        assert getattr(law, name) == pytest.approx(getattr(TRUTH, name), rel=1e-4)


def test_noise_costs_a_few_percent_and_is_told() -> None:
    fit = fit_steps(steps_of(TRUTH, 1_000, 2, noise=0.03))
    for name, within in (("a_ms", 0.02), ("b_ms", 0.1), ("c_ms", 0.05), ("d_ms", 0.03), ("e_ms", 0.25)):
        assert getattr(fit.law, name) == pytest.approx(getattr(TRUTH, name), rel=within)
    assert fit.seen.steps == 1_000
    assert fit.seen.mean_share == pytest.approx(0.024, abs=0.003), "0.8 of the noise's deviation"
    assert fit.held_out.steps == 500
    assert fit.held_out.mean_share == pytest.approx(0.024, abs=0.004)
    assert abs(fit.seen.bias_share) < 0.005


def test_one_step_in_ten_that_took_five_times_as_long_moves_nothing() -> None:
    steps = [replace(s, step_ms=s.step_ms * 5) if i % 10 == 0 else s for i, s in enumerate(steps_of(TRUTH, 500, 3))]
    law = fit_steps(steps).law
    assert law.step_ms(64, 64_000) == pytest.approx(TRUTH.step_ms(64, 64_000), rel=0.03)


def test_coefficients_are_never_negative() -> None:
    falling = [StepSample(n, n * 10, 0, 100.0 - n / 2) for n in range(1, 100)]
    law = fit_steps(falling).law
    assert min(law.a_ms, law.b_ms, law.c_ms, law.d_ms, law.e_ms) >= 0
    assert law.b_ms == 0
    assert law.c_ms == 0


def test_a_table_follows_what_a_line_cannot() -> None:
    truth = StepLaw(10.0, 0.1, 0.05, 0.02, batch=((1, 5.0), (8, 14.0), (64, 20.0), (128, 21.0)))
    steps = steps_of(truth, 600, 4, noise=0.01)
    line, table = fit_steps(steps), fit_steps(steps, (1, 8, 32, 64, 128))
    assert table.held_out.mean_share < 0.012 < line.held_out.mean_share
    for running in (1, 8, 30, 64, 128):
        assert table.law.batch_ms(running) == pytest.approx(truth.batch_ms(running), rel=0.05)
    assert [ms for _, ms in table.law.batch] == sorted(ms for _, ms in table.law.batch)
    assert table.law.a_ms == line.law.a_ms, "policies get the line"


def test_knots_lie_where_steps_are() -> None:
    assert batch_knots(steps_of(TRUTH, 1_000, 5)) == (8, 16, 32, 64, 128)
    assert batch_knots([StepSample(4, 0, 0, 1.0)] * 500) == (), "one batch size makes no table"
    assert batch_knots([]) == ()


def test_too_little_and_nonsense_are_refused() -> None:
    with pytest.raises(FitError, match="0 usable steps of 3, at least 8"):
        fit_steps([StepSample(1, 1, 1, 0.0), StepSample(0, 1, 1, 5.0), StepSample(1, -1, 1, 5.0)])
    with pytest.raises(FitError, match="knots must be at least 1 and grow"):
        fit_steps(steps_of(TRUTH, 20, 6), (8, 8))
    with pytest.raises(FitError, match="no replica has learned"):
        law_from_coefficients([StepCoefficients(1, 1, 1, 1)])


def test_learned_models_are_weighed_by_their_steps() -> None:
    law = law_from_coefficients([StepCoefficients(10, 1, 0.1, 0.01, 300), StepCoefficients(20, 2, 0.2, 0.02, 100)])
    assert law == StepLaw(12.5, 1.25, 0.125, 0.0125)


def test_errors_of_a_law_that_is_a_tenth_too_slow() -> None:
    steps = steps_of(TRUTH, 50, 7)
    errors = step_errors(TRUTH, [replace(s, step_ms=s.step_ms / 1.1) for s in steps])
    for share in (errors.mean_share, errors.p95_share, errors.bias_share):
        assert share == pytest.approx(0.1)


# --- records ----------------------------------------------------------------------------------------------------------

RECORD = {
    "seq": 1, "start_ns": 5, "duration_us": 20_000, "running": 3, "prefill_tokens": 100, "decode_seqs": 2,
    "kv_tokens": 640, "preempted": 0, "output_tokens": None,
}  # fmt: skip


def test_records_of_a_live_engine_are_read() -> None:
    lines = [json.dumps(RECORD), "", json.dumps({**RECORD, "running": 0})]
    assert parse_steps(lines, "s.jsonl") == [StepSample(3, 640, 100, 20.0)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"seq": 1, "runn', "s.jsonl:2: not JSON"),
        ("[1]", "s.jsonl:2: must be an object"),
        (json.dumps({**RECORD, "runing": 2}), "s.jsonl:2: unknown field 'runing'"),
        (json.dumps({**RECORD, "kv_tokens": -1}), "s.jsonl:2: kv_tokens must be a number, finite and not negative"),
        (json.dumps({k: v for k, v in RECORD.items() if k != "running"}), "s.jsonl:2: running must be a number"),
    ],
)
def test_bad_records_are_told_with_their_line(line: str, words: str) -> None:
    with pytest.raises(TraceError) as error:
        parse_steps([json.dumps(RECORD), line], "s.jsonl")
    assert words in str(error.value)


def test_a_file_without_steps_is_refused() -> None:
    with pytest.raises(TraceError, match="no step in it"):
        parse_steps(["", json.dumps({**RECORD, "running": 0})], "s.jsonl")


# --- least squares ----------------------------------------------------------------------------------------------------


def test_systems_without_a_solution_have_none() -> None:
    assert solve([[1.0, 2.0], [2.0, 4.0]], [1.0, 2.0]) is None
    assert solve([[0.0, 2.0], [1.0, 0.0]], [4.0, 3.0]) == [3.0, 2.0]


def test_not_negative_agrees_with_every_choice_of_free_unknowns() -> None:
    """The best of all subsets of unknowns whose own solution is not negative is the answer."""
    rng = Random("0/nnls")
    for _ in range(50):
        rows = [[rng.gauss(0, 1) for _ in range(3)] for _ in range(8)]
        targets = [rng.gauss(0, 1) for _ in range(8)]

        def loss(x: list[float], rows: list[list[float]] = rows, targets: list[float] = targets) -> float:
            return sum(
                (sum(a * b for a, b in zip(row, x, strict=True)) - t) ** 2 for row, t in zip(rows, targets, strict=True)
            )

        best = loss([0.0, 0.0, 0.0])
        for mask in range(1, 8):
            free = [i for i in range(3) if mask >> i & 1]
            gram = [[sum(r[i] * r[k] for r in rows) for k in free] for i in free]
            part = solve(gram, [sum(r[i] * t for r, t in zip(rows, targets, strict=True)) for i in free])
            if part is not None and min(part) >= 0:
                best = min(best, loss([part[free.index(i)] if i in free else 0.0 for i in range(3)]))
        found = not_negative(rows, targets, 3)
        assert min(found) >= 0
        assert loss(found) <= best + 1e-7


def test_unknowns_nothing_speaks_of_are_zero() -> None:
    assert not_negative([[1.0, 0.0]] * 4, [2.0] * 4, 2) == pytest.approx([2.0, 0.0])
    assert not_negative([[1.0, 1.0]] * 4, [2.0] * 4, 2) == pytest.approx([2.0, 0.0]), "twins: one of them"


def test_minimise_finds_the_bottom_of_a_bent_valley() -> None:
    def residuals(x: list[float]) -> list[float]:
        return [10 * (x[1] - x[0] * x[0]), 1 - x[0]]

    x, square = minimise(residuals, [-0.5, 0.5], rounds_max=200, step=1e-4, gain_min=0.0)
    assert square < 1e-3
    assert x == pytest.approx([1.0, 1.0], abs=0.1)
