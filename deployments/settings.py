"""Settings of the application: the ``args`` of serve_config.yaml, checked strictly.

The policy families are the dataclasses of ``policies/config.py`` themselves: pydantic reads their fields, types,
defaults and checks, so each is written once. Everything is strict: an unknown key, a string where a number belongs,
``nan``, or a section for a part that is switched off stops the start with path, value, reason and nearest valid key.

This module and the functions at its end are the only place that reads the process environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from deployments.engine_arguments import engine_arg_names
from deployments.settings_errors import SettingsError, key_paths, problems_of, shown, unknown_key
from policies.config import (
    AdmissionConfig,
    AffinityConfig,
    BatchingConfig,
    ControlConfig,
    FaultsConfig,
    ObjectivesConfig,
    PolicyConfig,
    RoutingConfig,
    ScalingConfig,
)

__all__ = [
    "CpuSettings",
    "EmulatedSettings",
    "FaultSettings",
    "GatewaySettings",
    "ModelSettings",
    "RecordingSettings",
    "Settings",
    "SettingsError",
]

RESERVED_ENGINE_ARGS = frozenset({"model", "served_model_name", "scheduler_cls", "hf_token"})
"""vLLM arguments that Tidegate sets itself, or that must not be written into a file (``hf_token``)."""


class _Strict(BaseModel):
    # Dataclasses named as field types take this configuration over as well.
    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


class CpuSettings(_Strict):
    """How one engine uses the CPU. Only for ``device: cpu``."""

    kv_cache_gib: int = Field(default=1, ge=1)
    """Memory for KV blocks, in GiB."""
    threads: int = Field(default=1, ge=1)
    """OpenMP threads of one engine. Two replicas on two cores want 1."""


class StepSettings(_Strict):
    """Step law of the emulated engine: ``step_ms = a + b*running + c*kv_tokens/1000 + d*prefill_tokens``.

    Defaults: real vLLM with SmolLM2-135M on one CPU core (31 ms at batch 1, 85 ms at 32, 1,400 prompt tokens in 2.6 s).
    """

    a_ms: float = Field(default=29.0, ge=0)
    b_ms: float = Field(default=1.7, ge=0)
    c_ms: float = Field(default=0.5, ge=0)
    d_ms: float = Field(default=1.8, ge=0)
    jitter_share: float = Field(default=0.0, ge=0, le=1)
    """Each step's duration is drawn evenly from this share around the law, by the seeded generator."""


class FaultSettings(_Strict):
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


class EmulatedSettings(_Strict):
    """Scale and script of the emulated engine. Only for ``engine: emulated``."""

    step: StepSettings = Field(default_factory=StepSettings)
    kv_blocks: int = Field(default=512, ge=1)
    block_tokens: int = Field(default=16, ge=1)
    running_seqs_max: int = Field(default=16, ge=1)
    step_tokens_max: int = Field(default=2_048, ge=16)
    context_tokens_max: int = Field(default=2_048, ge=1)
    start_ms: float = Field(default=0.0, ge=0)
    """Time from process start to readiness."""
    seed: int = Field(default=0, ge=0)
    text: str = Field(default="lorem", min_length=1, max_length=10_000)
    """Words the answers are made of."""
    faults: FaultSettings = Field(default_factory=FaultSettings)


class ModelSettings(_Strict):
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

    @field_validator("name")
    @classmethod
    def _printable(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:/+-]*", value):
            raise ValueError("may hold letters, digits and . _ : / + - only")
        return value


class GatewaySettings(_Strict):
    """The front door."""

    replicas: int = Field(default=1, ge=1, le=1_000)
    clients: Literal["loopback", "any"] = "loopback"
    """Who is answered: clients on this host, or any. There are no API keys yet: with ``any`` keep the port private."""
    body_bytes_max: int = Field(default=8_000_000, ge=1)
    """A larger request body is refused with 413 before it is parsed."""
    connect_timeout_ms: float = Field(default=2_000.0, gt=0)
    first_byte_timeout_ms: float = Field(default=600_000.0, gt=0)
    idle_timeout_ms: float = Field(default=600_000.0, gt=0)
    """Longest silence inside a response."""
    report_interval_ms: float = Field(default=1_000.0, ge=50)
    seed: int = Field(default=0, ge=0)
    """Seed of the router's tie-breaks."""


class RecordingSettings(_Strict):
    """What gateways and the controller write down for ``replay``: sizes, times, hashes and reports, never text."""

    folder: str | None = Field(default=None, min_length=1, max_length=4_096)
    """Absolute path on each host; off when absent."""
    file_bytes_max: int = Field(default=64_000_000, ge=10_000)
    """A file is closed at this size and the next one begun."""
    files_max: int = Field(default=8, ge=2, le=10_000)
    """Files kept of all gateways of a host together, and as many of its controllers; the oldest goes."""

    @field_validator("folder")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        if value is not None and (not value.startswith("/") or "\0" in value):
            raise ValueError("must be an absolute path: processes of Ray have working folders of their own")
        return value


class Settings(_Strict):
    """The whole application. Sections are those of serve_config.yaml's ``args``."""

    model: ModelSettings = Field(default_factory=ModelSettings)
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    objectives: ObjectivesConfig = Field(default_factory=ObjectivesConfig)
    admission: AdmissionConfig = Field(default_factory=AdmissionConfig)
    faults: FaultsConfig = Field(default_factory=FaultsConfig)
    routing: RoutingConfig = Field(default_factory=RoutingConfig)
    batching: BatchingConfig = Field(default_factory=BatchingConfig)
    affinity: AffinityConfig = Field(default_factory=AffinityConfig)
    scaling: ScalingConfig = Field(default_factory=ScalingConfig)
    control: ControlConfig = Field(default_factory=ControlConfig)
    recording: RecordingSettings = Field(default_factory=RecordingSettings)

    @classmethod
    def load(cls, args: Mapping[str, Any] | None, elsewhere: Iterable[str] = ()) -> Self:
        """Check ``args`` and return the settings.

        Args:
            args: the ``args`` of the application, as YAML or JSON gave them.
            elsewhere: valid keys outside of ``args``, to tell a misplaced one where it belongs.

        Raises:
            SettingsError: lines ``path: value: why; did you mean 'x'?``, one per problem.
        """
        if args is not None and not isinstance(args, Mapping):
            raise SettingsError([f"args: {shown(args)}: must be a section (key: value lines)"])
        try:
            settings = cls.model_validate_json(json.dumps(dict(args or {}), default=str))
        except ValidationError as error:
            raise SettingsError(problems_of(cls, error, _engine_arg_paths() | set(elsewhere))) from None
        problems = [*_switched_off(settings), *_contradictions(settings), *_engine_args(settings.model)]
        if problems:
            raise SettingsError(problems)
        return settings

    def to_args(self) -> dict[str, Any]:
        """Return plain values that ``load`` turns into equal settings (to hand over to another process)."""
        return self.model_dump(mode="json")

    def policy_config(self) -> PolicyConfig:
        """Return what ``build_policies`` needs."""
        return PolicyConfig(
            objectives=self.objectives,
            admission=self.admission,
            faults=self.faults,
            routing=self.routing,
            batching=self.batching,
            affinity=self.affinity,
            scaling=self.scaling,
            control=self.control,
        )


def _switched_off(settings: Settings) -> list[str]:
    """Sections that differ from their defaults although what they tune is switched off."""
    model = settings.model
    checks = [
        (model.engine == "vllm" and model.emulated != EmulatedSettings(), "model.emulated", "model.engine is 'vllm'"),
        (model.engine == "emulated" and bool(model.engine_args), "model.engine_args", "model.engine is 'emulated'"),
        (model.device == "gpu" and model.cpu != CpuSettings(), "model.cpu", "model.device is 'gpu'"),
        (
            not settings.batching.enabled and settings.batching != BatchingConfig(enabled=False),
            "batching",
            "batching.enabled is false",
        ),
        (
            not settings.affinity.enabled and settings.affinity != AffinityConfig(enabled=False),
            "affinity",
            "affinity.enabled is false",
        ),
        (
            settings.recording.folder is None and settings.recording != RecordingSettings(),
            "recording",
            "recording.folder is not set",
        ),
    ]
    return [f"{path}: has no effect because {why}; remove it or change that" for wrong, path, why in checks if wrong]


def _contradictions(settings: Settings) -> list[str]:
    """Values that are each valid but not together."""
    model, found = settings.model, []
    if model.device == "gpu" and model.num_gpus == 0:
        found.append("model.num_gpus: 0: must be above 0 with model.device 'gpu'")
    if model.device == "cpu" and model.num_gpus > 0:
        found.append(
            f"model.num_gpus: {model.num_gpus:g}: must be 0 with model.device 'cpu'; did you mean device: gpu?"
        )
    if model.device == "cpu" and model.accelerator_type is not None:
        found.append(f"model.accelerator_type: {model.accelerator_type!r}: only with model.device 'gpu'")
    return found


def _engine_args(model: ModelSettings) -> list[str]:
    """Unknown or reserved names under ``model.engine_args``."""
    known, found = engine_arg_names(), []
    for name in model.engine_args:
        path = f"model.engine_args.{name}"
        if name in RESERVED_ENGINE_ARGS:
            found.append(f"{path}: is set by Tidegate or by the environment; remove it")
        elif known is not None and name not in known:
            found.append(unknown_key(path, model.engine_args[name], _engine_arg_paths(), key_paths(Settings)))
    return found


def _engine_arg_paths() -> set[str]:
    return {f"model.engine_args.{name}" for name in (engine_arg_names() or frozenset()) - RESERVED_ENGINE_ARGS}


# --- the process environment ------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Return the folder of converted models.

    ``TIDEGATE_CACHE`` where it is set, else ``XDG_CACHE_HOME/tidegate``, else ``~/.cache/tidegate``.
    """
    own = os.environ.get("TIDEGATE_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "tidegate"


def child_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return this process's environment with ``extra`` on top, for a child process."""
    return {**os.environ, **extra}


def ray_token_file() -> Path | None:
    """Return the file of Ray's access token, made when it is absent; ``None`` when the token is in the environment.

    Ray's own default file is used, so that ``ray``, ``serve`` and ``ray.init`` find the same token.
    """
    if os.environ.get("RAY_AUTH_TOKEN"):
        return None
    chosen = os.environ.get("RAY_AUTH_TOKEN_PATH")
    path = Path(chosen).expanduser() if chosen else Path.home() / ".ray" / "auth_token"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    return path


def ray_token() -> str:
    """Return Ray's access token."""
    path = ray_token_file()
    return os.environ["RAY_AUTH_TOKEN"] if path is None else path.read_text(encoding="ascii").strip()
