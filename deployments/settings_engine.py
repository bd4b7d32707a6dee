"""Settings of the model, the engine that runs it and one replica: section ``model`` of serve_config.yaml's ``args``.

Part of ``deployments/settings.py``, which checks the whole; import its names from there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from deployments.engine_arguments import engine_arg_names
from policies.config_guard import DisaggregationConfig

RESERVED_ENGINE_ARGS = frozenset({"model", "served_model_name", "scheduler_cls", "hf_token"})
"""vLLM arguments that Tidegate sets itself, or that must not be written into a file (``hf_token``)."""


class Strict(BaseModel):
    """A section: unknown keys, wrong types and values that are no finite numbers are refused."""

    # Dataclasses named as field types take this configuration over as well.
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class CpuSettings(Strict):
    """How one engine uses the CPU. Only for ``device: cpu``."""

    kv_cache_gib: int = Field(default=1, ge=1)
    """Memory for KV blocks, in GiB."""
    threads: int = Field(default=1, ge=1)
    """OpenMP threads of one engine. Two replicas on two cores want 1."""


class StepSettings(Strict):
    """Step law of the emulated engine: ``step_ms = a + b*running + c*kv_tokens/1000 + d*prefill_tokens``.

    Defaults: real vLLM with SmolLM2-135M on one CPU core (31 ms at batch 1, 85 ms at 32, 1,400 prompt tokens in 2.6 s).
    """

    a_ms: float = Field(default=29.0, ge=0)
    b_ms: float = Field(default=1.7, ge=0)
    c_ms: float = Field(default=0.5, ge=0)
    d_ms: float = Field(default=1.8, ge=0)
    jitter_share: float = Field(default=0.0, ge=0, le=1)
    """Each step's duration is drawn evenly from this share around the law, by the seeded generator."""


class FaultSettings(Strict):
    """Scripted faults of the emulated engine. Each is off at its default; tests and drills turn them on."""

    start_failures: int = Field(default=0, ge=0)
    """The first so many starts fail."""
    kind: Literal["none", "error", "cut", "bad_json", "silence", "freeze", "unavailable"] = "none"
    """What happens to the requests that are hit: an error of the engine, a cut socket, a broken SSE event, silence and
    then a close, an engine that makes no further token while health stays good, or 503 at once."""
    after_tokens: int = Field(default=0, ge=0)
    """Output tokens a hit request gets before the fault; 0 is before the first."""
    share: float = Field(default=1.0, ge=0, le=1)
    """Share of requests that are hit, drawn from the seeded generator."""
    silence_s: float = Field(default=30.0, ge=0)
    """Length of the silence before the close."""
    marker: str | None = None
    """Only prompts that contain this are hit."""
    die_marker: str | None = None
    """A prompt that contains this kills the engine process."""
    signals: Literal["ok", "stop", "freeze", "nan"] = "ok"
    """What the replica reports: the truth, nothing, the same sample for ever, or NaN."""
    health: Literal["ok", "blocked", "failed"] = "ok"
    """How health checks are answered: truly, never, or with 503."""
    slow_factor: float = Field(default=1.0, gt=0, le=1_000)
    """Steps take this many times as long: a replica that is ill but answers."""
    ignore_aborts: bool = False
    """The engine goes on working for clients that left."""
    ignore_drain: bool = False
    """Requests in flight never end by themselves while the replica drains."""


class EmulatedSettings(Strict):
    """Scale and script of the emulated engine. Only for ``engine: emulated``."""

    step: StepSettings = Field(default_factory=StepSettings)
    kv_blocks: int = Field(default=512, ge=1)
    block_tokens: int = Field(default=16, ge=1)
    running_seqs_max: int = Field(default=16, ge=1)
    step_tokens_max: int = Field(default=2_048, ge=16)
    context_tokens_max: int = Field(default=2_048, ge=1)
    start_ms: float = Field(default=0.0, ge=0)
    """Time from process start to readiness."""
    wake_ms: float | None = Field(default=None, ge=0)
    """Time it takes to wake an engine that sleeps; ``None``: this engine cannot sleep."""
    seed: int = Field(default=0, ge=0)
    text: str = Field(default="lorem", min_length=1, max_length=10_000)
    """Words the answers are made of."""
    repeat_marker: str | None = None
    """Answers to prompts that contain this repeat one word: text that can be drafted."""
    speculative_depth: int = Field(default=0, ge=0, le=64)
    """Tokens drafted ahead by n-gram lookup, as vLLM's method of that name; 0: none."""
    faults: FaultSettings = Field(default_factory=FaultSettings)


class ModelSettings(Strict):
    """The model, the engine that runs it and the resources of one replica."""

    name: str = Field(default="smollm2-135m-instruct", min_length=1, max_length=128)
    """The name clients ask for."""
    source: str = Field(default="smollm2-135m-instruct", min_length=1, max_length=4_096)
    """A bundled model's name, a folder, or an id on the Hugging Face hub."""
    engine: Literal["vllm", "emulated"] = "vllm"
    device: Literal["cpu", "gpu"] = "cpu"
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Passed to vLLM as they are; names are checked against the installed vLLM."""
    cpu: CpuSettings = Field(default_factory=CpuSettings)
    emulated: EmulatedSettings = Field(default_factory=EmulatedSettings)
    num_cpus: float = Field(default=1.0, ge=0)
    """CPU cores Ray sets aside for one replica."""
    num_gpus: float = Field(default=0.0, ge=0)
    """GPUs Ray sets aside for one replica; above 0 with ``device: gpu`` only."""
    accelerator_type: str | None = None
    """Ray's name of the GPU kind, such as ``H100``; any kind when absent."""
    listen: Literal["loopback", "node"] = "loopback"
    """Where a replica's own port listens: loopback serves gateways of its host, node those of the whole cluster."""
    stuck_after_s: float = Field(default=30.0, gt=0)
    """An engine that has work and finishes no step for this long is unhealthy."""
    drain_s_max: float = Field(default=600.0, gt=0)
    """A replica that leaves waits this long for its open streams."""
    report_interval_ms: float = Field(default=1_000.0, ge=50)
    context_tokens_max: int | None = Field(default=None, ge=1)
    """Longest prompt plus output; ``None``: what the engine says."""

    @property
    def can_sleep(self) -> bool:
        """Whether its engines can give their device's memory back while they stand by; vLLM has that on GPUs alone."""
        if self.engine == "emulated":
            return self.emulated.wake_ms is not None
        return self.device == "gpu" and bool(self.engine_args.get("enable_sleep_mode"))

    @property
    def known_context_tokens(self) -> int | None:
        """Longest context as far as the settings say; ``None`` when only the engine knows."""
        if self.context_tokens_max is not None:
            return self.context_tokens_max
        if self.engine == "emulated":
            return self.emulated.context_tokens_max
        value = self.engine_args.get("max_model_len")
        return value if isinstance(value, int) else None

    @field_validator("name")
    @classmethod
    def _printable(cls, value: str) -> str:
        return check_name(value)


def check_name(value: str) -> str:
    """``value``, if it can be a model's name. Raises ``ValueError``."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/+-]{0,127}", value):
        raise ValueError("may hold letters, digits and . _ : / + - only, 128 at most")
    return value


def known_engine_args() -> frozenset[str] | None:
    """Names that may stand in ``model.engine_args``; ``None``: vLLM is not installed here, any may."""
    known = engine_arg_names()
    return None if known is None else known - RESERVED_ENGINE_ARGS


CONNECTOR: Mapping[str, Any] = MappingProxyType({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
"""vLLM's connector behind ``disaggregation``, and the role that lets a replica prefill as well as decode."""


def split_problems(model: ModelSettings, split: DisaggregationConfig, replicas_max: int) -> list[str]:
    """What stands in the way of handing caches over between replicas."""
    found, path = [], "disaggregation.enabled: True"
    if model.engine != "vllm":
        found.append(f"{path}: needs model.engine 'vllm', is {model.engine!r}: no other engine hands its cache over")
    if replicas_max < 2:
        found.append(f"{path}: needs scaling.replicas_max of at least 2, is {replicas_max}: one replica splits nothing")
    if split.prefill_replicas >= max(2, replicas_max):
        found.append(
            f"disaggregation.prefill_replicas: {split.prefill_replicas}: must be below scaling.replicas_max "
            f"({replicas_max}): somebody must decode"
        )
    if split.pull_timeout_ms >= model.stuck_after_s * 1_000:
        found.append(
            f"disaggregation.pull_timeout_ms: {split.pull_timeout_ms:g}: must be below model.stuck_after_s "
            f"({model.stuck_after_s:g} s): an engine that waits for blocks alone would count as stuck"
        )
    own = model.engine_args.get("kv_transfer_config") or {}
    for name, value in CONNECTOR.items():
        if isinstance(own, dict) and own.get(name, value) != value:
            where = f"model.engine_args.kv_transfer_config.{name}"
            found.append(f"{where}: {own[name]!r}: must be {value!r} with disaggregation.enabled; remove it")
    if not isinstance(own, dict):
        found.append(f"model.engine_args.kv_transfer_config: {own!r}: must be a section")
        return found
    extra, where = (
        own.get("kv_connector_extra_config", {}),
        "model.engine_args.kv_transfer_config.kv_connector_extra_config",
    )
    if not isinstance(extra, dict):
        found.append(f"{where}: {extra!r}: must be a section")
    elif extra.get("bidirectional_kv_xfer"):
        found.append(
            f"{where}.bidirectional_kv_xfer: each answer would keep its blocks, and nobody asks for them; remove it"
        )
    return found
