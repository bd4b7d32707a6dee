"""What a model costs per token, from its ``config.json``: parameters, bits of a weight, bytes of KV cache.

For dense and mixture-of-experts transformers with gated MLPs and grouped-query attention, per layer::

    attention   2 h q + 2 h k        h hidden size, q = heads * head size, k = KV heads * head size
    MLP         3 h m                m intermediate size; of a mixture: of each expert, and of the chosen ones
    at the end  h * vocabulary       the output matrix; the table of the input is looked up, not read

Biases and norms are left out (below 0.1 %). KV cache: ``2 * layers * k`` values a token. A kind of model that is not in
:data:`KINDS` is unknown, ``None``: a wrong roofline is worse than none.

It must not load a model, and must not fetch anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deployments.model import ModelError, resolve
from deployments.settings import ModelSettings
from policies.roofline import ModelFigures

KINDS = frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "phi3", "olmo2", "granite"})
"""``model_type`` of models that the formula fits."""

_BITS_OF_DTYPE = {"float32": 32, "bfloat16": 16, "float16": 16}
_BITS_OF_QUANTISATION = {"fp8": 8, "compressed-tensors": None, "awq": 4, "gptq": 4, "modelopt": None}
"""``None``: says too little about its weights."""


def model_figures(model: ModelSettings) -> ModelFigures | None:
    """Figures of the model that ``model`` names; ``None`` where its configuration is not on this machine or too little
    is known of it.
    """
    config = _config(model)
    return None if config is None else figures_of(config, model.engine_args)


def figures_of(config: Mapping[str, Any], engine_args: Mapping[str, Any]) -> ModelFigures | None:
    """Figures from ``config.json`` and what vLLM is told beside it."""
    if config.get("model_type") not in KINDS:
        return None
    bits = _weight_bits(config, engine_args)
    try:
        hidden, layers, heads = (int(config[k]) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
        vocabulary = int(config["vocab_size"])
        head = int(config.get("head_dim") or hidden // heads)
        keys = int(config.get("num_key_value_heads") or heads) * head
        experts, chosen, width = _mlp(config)
    except (KeyError, TypeError, ValueError):
        return None
    if bits is None:
        return None
    attention, end = 2 * hidden * heads * head + 2 * hidden * keys, hidden * vocabulary
    mlp = 3 * hidden * width
    kv_bytes = _kv_bytes(bits, str(engine_args.get("kv_cache_dtype", "auto")))
    return ModelFigures(
        parameters=float(layers * (attention + experts * mlp) + end),
        active_parameters=float(layers * (attention + chosen * mlp) + end),
        weight_bits=bits,
        kv_bytes_per_token=float(2 * layers * keys * kv_bytes),
    )


def _kv_bytes(weight_bits: int, dtype: str) -> int:
    """Of one value: as the engine is told, else as the model computes (in 16 bits where weights are narrower)."""
    return 1 if dtype.startswith("fp8") else max(2, weight_bits // 8)


def _mlp(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Experts, those chosen for a token, and the width of one; a dense model has one of each."""
    experts = config.get("num_local_experts") or config.get("num_experts")
    if not experts:
        return 1, 1, int(config["intermediate_size"])
    if config.get("shared_expert_intermediate_size"):
        raise ValueError("shared experts are not in the formula")
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    return int(experts), int(config["num_experts_per_tok"]), int(width)


def _weight_bits(config: Mapping[str, Any], engine_args: Mapping[str, Any]) -> int | None:
    own = config.get("quantization_config")
    method = engine_args.get("quantization") or (own.get("quant_method") if isinstance(own, Mapping) else None)
    if method is not None:
        return _BITS_OF_QUANTISATION.get(str(method))
    dtype = engine_args.get("dtype")
    if dtype in (None, "auto"):
        dtype = config.get("dtype") or config.get("torch_dtype")
    return _BITS_OF_DTYPE.get(str(dtype))


def _config(model: ModelSettings) -> Mapping[str, Any] | None:
    """Its ``config.json``, from its folder or from the hub's cache, where the engine has put it."""
    try:
        location = resolve(model.source)
    except ModelError:
        return None
    path = Path(location) / "config.json"
    if not Path(location).is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(location, "config.json", revision=model.engine_args.get("revision"))
        if not isinstance(found, str):
            return None
        path = Path(found)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None
