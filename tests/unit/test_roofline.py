"""The utilisation ratio: known workloads against hand-made figures, and where it must say nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from policies.measures import GpuReading
from policies.roofline import DEVICES, Bound, Load, ModelFigures, roofline_of, utilisation
from policies.types import StepCoefficients

LLAMA_8B = ModelFigures(8.03e9, 8.03e9, 16, 131_072)
ROOFLINE = roofline_of("NVIDIA H100 80GB HBM3", 1, LLAMA_8B)
STEP = StepCoefficients(6.6, 0.02, 0.05, 0.02, 1_000, 0.02)

DECODE = Load(tokens=32 * 130, prefill_tokens=0, steps=130, running=32, kv_tokens=32_000, busy_s=1.0, busy_share=1.0)
"""Batch 32 at 7.7 ms a step."""
PREFILL = Load(tokens=40_000, prefill_tokens=40_000, steps=20, running=0, kv_tokens=2_000, busy_s=0.85, busy_share=0.85)
"""Prompts at 47,000 tokens a second."""


def test_decoding_is_bound_by_memory_and_prompts_by_compute() -> None:
    decode, prefill = utilisation(DECODE, ROOFLINE, STEP), utilisation(PREFILL, ROOFLINE, STEP)
    assert decode is not None
    assert prefill is not None
    assert (decode.bound, prefill.bound) == (Bound.MEMORY, Bound.COMPUTE)
    # 130 x (16.06 GB + 32,000 x 131,072 B) of 3.35 TB/s; 4,160 x 16.06 GFLOP of 989 TFLOP/s
    assert decode.memory_share == pytest.approx(0.786, abs=0.001)
    assert decode.compute_share == pytest.approx(0.0676, abs=0.0001)
    assert decode.ratio == decode.memory_share
    assert prefill.compute_share == pytest.approx(0.764, abs=0.001)
    assert prefill.ratio == prefill.compute_share


def test_low_shares_of_both_limits_are_overhead() -> None:
    slow = utilisation(replace(DECODE, tokens=30, steps=30, running=1, kv_tokens=100), ROOFLINE, STEP)
    assert slow is not None
    assert slow.bound is Bound.OVERHEAD


def test_without_a_roofline_the_step_model_says_which() -> None:
    decode, prefill = utilisation(DECODE, None, STEP), utilisation(PREFILL, None, STEP)
    assert decode is not None
    assert prefill is not None
    assert (decode.bound, decode.ratio, decode.nvml_agrees) == (Bound.MEMORY, None, None)
    assert prefill.bound is Bound.COMPUTE
    assert prefill.token_share == pytest.approx(40 / 46.7)


def test_nothing_is_said_of_a_replica_that_did_nothing_or_is_unknown() -> None:
    assert utilisation(replace(DECODE, steps=0), ROOFLINE, STEP) is None
    assert utilisation(replace(DECODE, busy_s=0.0), ROOFLINE, STEP) is None
    assert utilisation(DECODE, None, None) is None
    assert utilisation(DECODE, None, replace(STEP, samples=3)) is None


def test_nvml_checks_the_estimate() -> None:
    agreeing = utilisation(DECODE, ROOFLINE, STEP, GpuReading(sm_share=1.0, memory_share=0.7))
    assert agreeing is not None
    assert (agreeing.nvml_agrees, agreeing.bound) == (True, Bound.MEMORY)
    # prompts that seem to keep memory busy on a device whose memory hardly works: the step model's word is taken
    wrong = replace(ROOFLINE, bytes_per_s=1e11) if ROOFLINE is not None else None
    against = utilisation(PREFILL, wrong, STEP, GpuReading(sm_share=0.9, memory_share=0.2))
    assert against is not None
    assert (against.nvml_agrees, against.bound) == (False, Bound.COMPUTE)
    silent = utilisation(DECODE, ROOFLINE, STEP, GpuReading(power_w=300.0))
    assert silent is not None
    assert silent.nvml_agrees is None


def test_a_half_busy_replica_is_compared_with_half_of_nvmls_time() -> None:
    half = replace(DECODE, busy_share=0.5)
    found = utilisation(half, ROOFLINE, STEP, GpuReading(sm_share=0.5, memory_share=0.4))
    assert found is not None
    assert found.nvml_agrees is True


def test_narrow_weights_use_the_narrow_units_and_devices_add_up() -> None:
    narrow = replace(LLAMA_8B, weight_bits=8)
    one, two = roofline_of("H100", 1, narrow), roofline_of("H100", 2, narrow)
    assert one is not None
    assert two is not None
    assert (one.flops_per_s, two.flops_per_s, two.bytes_per_s) == (1_978e12, 2 * 1_978e12, 2 * 3.35e12)
    assert one.weight_bytes == pytest.approx(8.03e9)
    a100 = roofline_of("A100", 1, narrow)
    assert a100 is not None
    assert a100.flops_per_s == 312e12  # has no fp8


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA A100-SXM4-40GB", "NVIDIA H100 NVL", "", "cpu"])
def test_devices_that_are_not_in_the_table_have_no_roofline(name: str) -> None:
    assert name not in DEVICES
    assert roofline_of(name, 1, LLAMA_8B) is None
    assert roofline_of("H100", 1, None) is None
    assert roofline_of("H100", 0, LLAMA_8B) is None
