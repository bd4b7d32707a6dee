"""Admission: both bounds hold at their edge, what is admitted comes back once, a lone giant runs."""

from __future__ import annotations

import pytest

from policies.admission.limits import Admission, request_tokens
from policies.config import AdmissionConfig
from policies.config_base import ConfigError
from policies.types import Request


def a_request(request_id: str, prompt_tokens: int = 10, output_tokens_max: int | None = 0) -> Request:
    return Request(
        request_id=request_id,
        model="m",
        endpoint="/v1/completions",
        tenant="",
        prompt_tokens=prompt_tokens,
        output_tokens_max=output_tokens_max,
        blocks=(),
        block_tokens=64,
        stream=True,
        arrival_ns=0,
    )


def test_requests_bound_is_exact() -> None:
    admission = Admission(AdmissionConfig(inflight_requests_max=3))
    assert [admission.try_admit(a_request(f"r{i}")) for i in range(3)] == [None, None, None]
    refusal = admission.try_admit(a_request("r3"))
    assert refusal is not None
    assert refusal.code == "inflight_requests"
    assert "3" in refusal.text
    assert admission.requests == 3
    admission.release("r1")
    assert admission.try_admit(a_request("r3")) is None


def test_tokens_bound_is_exact() -> None:
    admission = Admission(AdmissionConfig(inflight_tokens_max=100))
    assert admission.try_admit(a_request("a", 30, 30)) is None
    assert admission.try_admit(a_request("b", 20, 20)) is None
    refusal = admission.try_admit(a_request("c", 1, 0))
    assert refusal is not None
    assert refusal.code == "inflight_tokens"
    assert (admission.requests, admission.tokens) == (2, 100)


def test_refused_request_leaves_no_trace() -> None:
    admission = Admission(AdmissionConfig(inflight_requests_max=1))
    admission.try_admit(a_request("a", 5))
    admission.try_admit(a_request("b", 7))
    admission.release("b")
    assert (admission.requests, admission.tokens) == (1, 5)


def test_lone_giant_is_admitted_and_then_nothing_else() -> None:
    admission = Admission(AdmissionConfig(inflight_tokens_max=100))
    assert admission.try_admit(a_request("giant", 10_000)) is None
    assert admission.try_admit(a_request("small", 1)) is not None
    admission.release("giant")
    assert admission.try_admit(a_request("small", 1)) is None


def test_giant_is_refused_beside_others() -> None:
    admission = Admission(AdmissionConfig(inflight_tokens_max=100))
    admission.try_admit(a_request("small", 1))
    assert admission.try_admit(a_request("giant", 10_000)) is not None


def test_release_is_idempotent_and_ignores_strangers() -> None:
    admission = Admission(AdmissionConfig())
    admission.try_admit(a_request("a", 5))
    for request_id in ("stranger", "a", "a"):
        admission.release(request_id)
    assert (admission.requests, admission.tokens) == (0, 0)


def test_same_id_twice_is_a_programming_error() -> None:
    admission = Admission(AdmissionConfig())
    admission.try_admit(a_request("a"))
    with pytest.raises(ValueError, match="admitted already"):
        admission.try_admit(a_request("a"))
    assert admission.requests == 1


@pytest.mark.parametrize(("output_tokens_max", "tokens"), [(None, 266), (0, 10), (5, 15)])
def test_unknown_output_is_estimated_and_zero_is_zero(output_tokens_max: int | None, tokens: int) -> None:
    assert request_tokens(AdmissionConfig(), a_request("a", 10, output_tokens_max)) == tokens


def test_estimate_is_configurable_and_checked() -> None:
    assert request_tokens(AdmissionConfig(output_tokens_estimate=1), a_request("a", 10, None)) == 11
    with pytest.raises(ConfigError, match="output_tokens_estimate"):
        AdmissionConfig(output_tokens_estimate=0)
