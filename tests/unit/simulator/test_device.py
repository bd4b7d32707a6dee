"""Rooflines of the profiles, against the profiles' own measured step laws."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autoscaling.simulator.device import roofline_of_profile
from autoscaling.simulator.spec import EngineProfile
from deployments.simulation.profile_files import load_profile, profile_names
from policies.roofline import Bound, Load, utilisation

KNOWN = [name for name in profile_names() if name.startswith(("h100", "h200", "a100", "l40s"))]


@pytest.fixture(params=KNOWN)
def profile(request: pytest.FixtureRequest) -> EngineProfile:
    return load_profile(request.param)


def test_a_decode_step_of_one_sequence_reads_its_weights_at_a_speed_the_device_has(profile: EngineProfile) -> None:
    step_s = profile.law.step_ms(1, 500) / 1e3
    load = Load(tokens=1, prefill_tokens=0, steps=1, running=1, kv_tokens=500, busy_s=step_s, busy_share=1.0)
    found = utilisation(load, roofline_of_profile(profile), None)
    assert found is not None
    assert found.memory_share is not None
    assert 0.2 < found.memory_share < 1.0
    assert found.bound is Bound.MEMORY


def test_a_step_full_of_prompts_computes_at_a_speed_the_device_has(profile: EngineProfile) -> None:
    tokens = profile.step_tokens_max
    step_s = profile.law.step_ms(0, 0, tokens, tokens * tokens / 2) / 1e3
    load = Load(tokens, tokens, 1, 0, tokens / 2, step_s, 1.0)
    found = utilisation(load, roofline_of_profile(profile), None)
    assert found is not None
    assert found.compute_share is not None
    assert 0.1 < found.compute_share < 1.0
    over_pcie = profile.gpu == "L40S" and profile.gpus > 1  # most of a step is then spent on sums between devices
    assert found.bound is (Bound.OVERHEAD if over_pcie else Bound.COMPUTE)


@pytest.mark.parametrize("change", [{"gpu": "none"}, {"model": "m"}, {"model": "gpt-2xB"}, {"kv_bytes_per_token": 0}])
def test_what_a_profile_does_not_name_is_unknown(change: dict[str, object]) -> None:
    profile = load_profile("h100-llama-3.1-8b-bf16")
    assert roofline_of_profile(profile) is not None
    assert roofline_of_profile(replace(profile, **change)) is None  # type: ignore[arg-type]


def test_a_mixture_uses_its_active_parameters() -> None:
    mixture = replace(load_profile("h100-llama-3.1-8b-bf16"), model="Qwen3-30B-A3B-Instruct-2507")
    roofline = roofline_of_profile(mixture)
    assert roofline is not None
    assert (roofline.weight_bytes, roofline.flops_per_token) == (60e9, 6e9)
