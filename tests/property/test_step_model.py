"""Whatever an engine reports, the step model stays finite, not negative, and no steps are lost from the count."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.step_model import StepModel, prefill_ms
from policies.types import StepCoefficients
from tests.examples import examples

anything = st.floats(allow_nan=True, allow_infinity=True) | st.integers(-10, 10**6)
plausible = st.tuples(st.integers(0, 512), st.integers(0, 10**6), st.integers(0, 32_768), st.floats(1e-3, 1e5))
steps = st.lists(plausible | st.tuples(anything, anything, anything, anything), max_size=80)
values = st.floats(0, 1_000)
priors = st.builds(StepCoefficients, values, values, values, values)


@settings(max_examples=examples(300), deadline=None)
@given(priors, steps)
def test_coefficients_stay_finite_and_not_negative(prior: StepCoefficients, seen: list[tuple[float, ...]]) -> None:
    model = StepModel(prior)
    for running, kv_tokens, prefill_tokens, step_ms in seen:
        model.observe(running, kv_tokens, prefill_tokens, step_ms)
    c = model.coefficients()
    assert all(math.isfinite(v) and v >= 0 for v in (c.a_ms, c.b_ms, c.c_ms, c.d_ms))
    assert c.samples + model.refused == len(seen)
    assert c.error_share is None or c.error_share >= 0
    assert model.predict_ms(16, 10_000, 512) >= 0


@given(priors, st.integers(0, 20_000), st.integers(1, 4_096), st.integers(0, 64), st.integers(0, 10**6))
def test_prefill_never_gets_shorter_with_more_tokens(
    c: StepCoefficients, tokens: int, chunk: int, running: int, kv_tokens: int
) -> None:
    assert prefill_ms(c, tokens + 1, chunk, running, kv_tokens) >= prefill_ms(c, tokens, chunk, running, kv_tokens) * (
        1 - 1e-12
    )
