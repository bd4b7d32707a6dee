"""What models cost, from their configurations, against published parameter counts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deployments.model_figures import figures_of, model_figures
from deployments.settings import Settings

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 4_096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14_336, "vocab_size": 128_256, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_30B_A3B: dict[str, Any] = {
    "model_type": "qwen3_moe", "hidden_size": 2_048, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "intermediate_size": 6_144,
    "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151_936, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_a_dense_model_has_its_published_parameters_less_the_input_table() -> None:
    figures = figures_of(LLAMA_8B, {})
    assert figures is not None
    assert figures.parameters + 4_096 * 128_256 == pytest.approx(8.03e9, rel=0.001)
    assert figures.active_parameters == figures.parameters
    assert (figures.weight_bits, figures.kv_bytes_per_token) == (16, 131_072)


def test_a_mixture_uses_few_of_its_parameters() -> None:
    figures = figures_of(QWEN3_30B_A3B, {})
    assert figures is not None
    assert figures.parameters == pytest.approx(30.5e9, rel=0.02)
    assert figures.active_parameters == pytest.approx(3.3e9, rel=0.1)
    assert figures.kv_bytes_per_token == 98_304


@pytest.mark.parametrize(
    ("config", "arguments", "bits", "kv_bytes"),
    [
        ({}, {"dtype": "float32"}, 32, 262_144),
        ({}, {"quantization": "fp8"}, 8, 131_072),
        ({"quantization_config": {"quant_method": "fp8"}}, {"kv_cache_dtype": "fp8_e4m3"}, 8, 65_536),
        ({"quantization_config": {"quant_method": "awq"}}, {}, 4, 131_072),
        ({"dtype": "float16", "torch_dtype": None}, {"dtype": "auto"}, 16, 131_072),
    ],
)
def test_weights_and_cache_are_as_wide_as_the_engine_is_told(
    config: dict[str, Any], arguments: dict[str, Any], bits: int, kv_bytes: int
) -> None:
    figures = figures_of(LLAMA_8B | config, arguments)
    assert figures is not None
    assert (figures.weight_bits, figures.kv_bytes_per_token) == (bits, kv_bytes)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "deepseek_v3"},
        {"hidden_size": None},
        {"torch_dtype": "int3"},
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        {"num_experts": 8, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 64},
    ],
)
def test_a_model_that_the_formula_does_not_fit_is_unknown(change: dict[str, Any]) -> None:
    assert figures_of(LLAMA_8B | change, {}) is None


def test_the_configuration_is_read_from_the_models_folder(tmp_path: Path) -> None:
    settings = Settings.load({"auth": "none", "model": {"name": "m", "source": str(tmp_path)}})
    assert model_figures(settings.model) is None
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B), encoding="utf-8")
    assert model_figures(settings.model) == figures_of(LLAMA_8B, {})
    (tmp_path / "config.json").write_text("[1]", encoding="utf-8")
    assert model_figures(settings.model) is None
    gone = settings.model.model_copy(update={"source": str(tmp_path / "gone")})
    assert model_figures(gone) is None


def test_a_model_that_is_not_on_this_machine_is_unknown() -> None:
    settings = Settings.load({"auth": "none", "model": {"name": "m", "source": "nobody/has-this-model"}})
    assert model_figures(settings.model) is None
