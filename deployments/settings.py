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
from typing import Any, Literal, Self, cast

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from deployments.key_file import KEYS_MAX
from deployments.keys import KeyRecord
from deployments.settings_engine import (
    RESERVED_ENGINE_ARGS,
    CpuSettings,
    EmulatedSettings,
    FaultSettings,
    ModelSettings,
    StepSettings,
    Strict,
    known_engine_args,
    split_problems,
)
from deployments.settings_errors import SettingsError, key_paths, problems_of, shown, unknown_key
from deployments.settings_models import FleetSettings, ModelEntry, clashes, named, seen_from
from deployments.settings_records import LedgerSettings, RecordingSettings, TracingSettings, absolute_path
from policies.config import (
    AdmissionConfig,
    AffinityConfig,
    BatchingConfig,
    ClassesConfig,
    ControlConfig,
    FaultsConfig,
    ObjectivesConfig,
    PolicyConfig,
    PricesConfig,
    RoutingConfig,
    ScalingConfig,
    TasksConfig,
    TenantConfig,
)
from policies.config_guard import DisaggregationConfig, GuardConfig, SpeculationConfig
from policies.objectives import contradictions, for_model, objectives_for
from policies.types import Priority

__all__ = [
    "AuthSettings",
    "CpuSettings",
    "EmulatedSettings",
    "FaultSettings",
    "GatewaySettings",
    "LedgerSettings",
    "ModelSettings",
    "RecordingSettings",
    "Settings",
    "SettingsError",
    "StepSettings",
    "TracingSettings",
]


RELOADABLE = ("objectives", "classes")
"""Sections that Serve's ``user_config`` may bring anew while the gateway runs."""


class GatewaySettings(Strict):
    """The front door."""

    replicas: int = Field(default=1, ge=1, le=1_000)
    clients: Literal["loopback", "any"] = "loopback"
    """Who is answered: clients on this host, or any. ``any`` needs API keys (``auth``)."""
    body_bytes_max: int = Field(default=8_000_000, ge=1)
    """A larger request body is refused with 413 before it is parsed."""
    connect_timeout_ms: float = Field(default=2_000.0, gt=0)
    first_byte_timeout_ms: float = Field(default=600_000.0, gt=0)
    """Longest time from a dispatch to its first byte."""
    idle_timeout_ms: float = Field(default=600_000.0, gt=0)
    """Longest silence of a replica inside a response."""
    total_timeout_ms: float = Field(default=3_600_000.0, gt=0)
    """Longest time from arrival to the end of a response."""
    client_idle_timeout_ms: float = Field(default=60_000.0, gt=0)
    """A client that takes nothing for this long while bytes wait for it is given up."""
    body_timeout_ms: float = Field(default=60_000.0, gt=0)
    """A request whose body is not complete after this long is refused with 408."""
    report_interval_ms: float = Field(default=1_000.0, ge=50)
    seed: int = Field(default=0, ge=0)
    """Seed of the router's tie-breaks."""
    cache_salt_file: str | None = Field(default=None, min_length=1, max_length=4_096)
    """Absolute path on each host. Its first line is the secret that keeps tenants' caches apart; else one is made."""

    @field_validator("cache_salt_file")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return absolute_path(value)


class AuthSettings(Strict):
    """API keys. Needed for every request unless the section is the word ``none``."""

    keys_file: str | None = Field(default=None, min_length=1, max_length=4_096)
    """Absolute path on each host of a file that ``keys create`` writes; followed while the gateway runs."""
    keys: list[KeyRecord] = Field(default_factory=list, max_length=KEYS_MAX)
    """Keys that change with the configuration only: what ``keys create --no-file`` prints, without the key itself."""
    _none: bool = PrivateAttr(default=False)

    @property
    def required(self) -> bool:
        """A request needs a key."""
        return not self._none

    @field_validator("keys_file")
    @classmethod
    def _absolute(cls, value: str | None) -> str | None:
        return absolute_path(value)

    @field_validator("keys")
    @classmethod
    def _distinct(cls, value: list[KeyRecord]) -> list[KeyRecord]:
        if len({record.id for record in value}) < len(value):
            raise ValueError("have an id twice")
        return value

    @model_validator(mode="wrap")
    @classmethod
    def _none_or_keys(cls, value: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        if value == "none":
            off = cls.model_construct()
            off._none = True  # noqa: SLF001 (its own class)
            return cast(Self, off)
        if not isinstance(value, dict | cls):
            raise ValueError("be the word none, or a section with keys_file or keys")
        return handler(value)

    @model_serializer(mode="wrap")
    def _as_written(self, handler: SerializerFunctionWrapHandler) -> Any:
        return "none" if self._none else handler(self)


class Settings(Strict):
    """The whole application. Sections are those of serve_config.yaml's ``args``."""

    model: ModelSettings = Field(default_factory=ModelSettings)
    models: dict[str, ModelEntry] = Field(default_factory=dict)
    """Models beside the first one, by the name clients ask for."""
    fleet: FleetSettings = Field(default_factory=FleetSettings)
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)
    auth: AuthSettings = Field(default_factory=AuthSettings)
    objectives: ObjectivesConfig = Field(default_factory=ObjectivesConfig)
    admission: AdmissionConfig = Field(default_factory=AdmissionConfig)
    classes: ClassesConfig = Field(default_factory=ClassesConfig)
    tenants: dict[str, TenantConfig] = Field(default_factory=dict)
    prices: PricesConfig = Field(default_factory=PricesConfig)
    tasks: TasksConfig = Field(default_factory=TasksConfig)
    faults: FaultsConfig = Field(default_factory=FaultsConfig)
    routing: RoutingConfig = Field(default_factory=RoutingConfig)
    batching: BatchingConfig = Field(default_factory=BatchingConfig)
    affinity: AffinityConfig = Field(default_factory=AffinityConfig)
    scaling: ScalingConfig = Field(default_factory=ScalingConfig)
    control: ControlConfig = Field(default_factory=ControlConfig)
    speculation: SpeculationConfig = Field(default_factory=SpeculationConfig)
    guard: GuardConfig = Field(default_factory=GuardConfig)
    disaggregation: DisaggregationConfig = Field(default_factory=DisaggregationConfig)
    ledger: LedgerSettings = Field(default_factory=LedgerSettings)
    recording: RecordingSettings = Field(default_factory=RecordingSettings)
    tracing: TracingSettings = Field(default_factory=TracingSettings)

    @field_validator("models")
    @classmethod
    def _named(cls, value: dict[str, ModelEntry]) -> dict[str, ModelEntry]:
        return named(value)

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
        problems = list(clashes(settings)) or _problems(settings)
        for name in settings.models if not problems else ():
            problems += [f"models.{name}.{line}" for line in _problems(settings.of(name))]
        if problems:
            raise SettingsError(problems)
        return settings

    def of(self, name: str) -> Self:
        """These settings as the model ``name`` sees them: its sections, and all that is the application's.

        Raises:
            KeyError: no such model is served.
        """
        return cast(Self, seen_from(self, name))

    def to_args(self) -> dict[str, Any]:
        """Return plain values that ``load`` turns into equal settings (to hand over to another process)."""
        return self.model_dump(mode="json")

    def policy_config(self) -> PolicyConfig:
        """Return what ``build_policies`` needs; objectives are those of the model that is served."""
        config = PolicyConfig(
            objectives=self.objectives,
            admission=self.admission,
            classes=self.classes,
            tenants=self.tenants,
            prices=self.prices,
            tasks=self.tasks,
            gateways=self.gateway.replicas,
            faults=self.faults,
            routing=self.routing,
            batching=self.batching,
            affinity=self.affinity,
            scaling=self.scaling,
            control=self.control,
            speculation=self.speculation,
            guard=self.guard,
            disaggregation=self.disaggregation,
        )
        return for_model(config, self.model.name)

    def with_objectives(self, user_config: Mapping[str, Any] | None) -> Self:
        """Return these settings with the sections ``objectives`` and ``classes`` of Serve's ``user_config``.

        What ``user_config`` leaves out stays as these settings have it; ``null`` takes an optional one away.

        Raises:
            SettingsError: it holds anything else, a value out of range, or promises that contradict each other.
        """
        given = {} if user_config is None else user_config
        if not isinstance(given, Mapping):
            raise SettingsError([f"user_config: {shown(given)}: must be a section with objectives, classes or both"])
        wrong = sorted(str(key) for key in given if key not in RELOADABLE)
        if wrong:
            names = " and ".join(RELOADABLE)
            raise SettingsError(
                [f"user_config.{key}: only {names} can change while it runs; put the rest into args" for key in wrong]
            )
        return self.load(_merged(self.to_args(), given))


def _merged(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """``base`` with ``given`` laid over it, sections key by key."""
    merged = dict(base)
    for key, value in given.items():
        held = base.get(key)
        merged[key] = _merged(held, value) if isinstance(held, Mapping) and isinstance(value, Mapping) else value
    return merged


def _problems(settings: Settings) -> list[str]:
    return [*_switched_off(settings), *_contradictions(settings), *_engine_args(settings.model)]


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
            not settings.speculation.enabled and settings.speculation != SpeculationConfig(enabled=False),
            "speculation",
            "speculation.enabled is false",
        ),
        (
            not settings.disaggregation.enabled and settings.disaggregation != DisaggregationConfig(),
            "disaggregation",
            "disaggregation.enabled is false",
        ),
        (
            not settings.ledger.enabled and settings.ledger != LedgerSettings(enabled=False),
            "ledger",
            "ledger.enabled is false",
        ),
        (
            settings.recording.folder is None and settings.recording != RecordingSettings(),
            "recording",
            "recording.folder is not set",
        ),
        (
            settings.tracing.otlp_endpoint is None and settings.tracing != TracingSettings(),
            "tracing",
            "tracing.otlp_endpoint is not set",
        ),
    ]
    checks += [
        (getattr(settings.scaling, name) != getattr(ScalingConfig(), name), f"scaling.{name}", "replicas_min is not 0")
        for name in ("zero_after_s", "start_s_prior", "start_s_max", "start_tries_max", "start_backoff_s", "hold_s_max")
        if settings.scaling.replicas_min
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
    if settings.gateway.clients == "any" and not settings.auth.required:
        found.append("gateway.clients: 'any': needs API keys; remove auth: none, or set gateway.clients to loopback")
    free = settings.prices == PricesConfig(
        replica_usd_per_hour=settings.prices.replica_usd_per_hour, missed_usd=settings.prices.missed_usd
    )
    found += _scaling_problems(settings) + _broken_promises(settings)
    if settings.disaggregation.enabled:
        found += split_problems(model, settings.disaggregation, settings.scaling.replicas_max)
    for name, tenant in settings.tenants.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
            found.append(f"tenants: {name[:70]!r}: must be 1 to 64 letters, digits, . _ or -")
        if tenant.budget_usd_max is not None and free:
            found.append(f"tenants.{name}.budget_usd_max: has no effect because all prices are 0; set prices")
    return found


def _scaling_problems(settings: Settings) -> list[str]:
    """What ``scaling`` asks for and cannot have."""
    found, model = [], settings.model
    scaling = settings.scaling
    if scaling.replicas_min == 0 and not scaling.enabled:
        found.append("scaling.replicas_min: 0: needs scaling.enabled, without which nobody wakes the model")
    if scaling.replicas_min == 0 and scaling.hold_s_max * 1_000 > settings.gateway.total_timeout_ms:
        limit_s = settings.gateway.total_timeout_ms / 1_000
        found.append(f"scaling.hold_s_max: {scaling.hold_s_max:g}: is above gateway.total_timeout_ms ({limit_s:g} s)")
    if scaling.warm_max > scaling.warm_min and not settings.prices.missed_usd:
        found.append(f"scaling.warm_max: {scaling.warm_max}: has no effect above warm_min while prices.missed_usd is 0")
    if scaling.asleep_price_share < 1 and not model.can_sleep:
        where = "needs engine_args.enable_sleep_mode" if model.device == "gpu" else "vLLM cannot sleep on CPU"
        found.append(f"scaling.asleep_price_share: {scaling.asleep_price_share:g}: {where}")
    return found


def _broken_promises(settings: Settings) -> list[str]:
    """Objectives that nobody could keep, or that are for nobody."""
    model, gateway, config = settings.model.name, settings.gateway, settings.policy_config()
    found = [
        f"objectives.models.{name}: has no effect because this application serves {model!r}; remove or rename it"
        for name in settings.objectives.models
        if name != model and name not in settings.models
    ]
    found += contradictions(config, model)
    for priority in Priority:
        objectives = objectives_for(config, model, priority)
        limits = (
            ("ttft_ms", objectives.ttft_ms, "first_byte_timeout_ms", gateway.first_byte_timeout_ms),
            ("e2e_ms", objectives.e2e_ms, "total_timeout_ms", gateway.total_timeout_ms),
        )
        found += [
            f"classes.{priority}.{name}: {value:g}: is above gateway.{limit_name} ({limit:g}), which ends them first"
            for name, value, limit_name, limit in limits
            if value is not None and value > limit
        ]
    return found


def _engine_args(model: ModelSettings) -> list[str]:
    """Unknown or reserved names under ``model.engine_args``."""
    known, found = known_engine_args(), []
    for name in model.engine_args:
        path = f"model.engine_args.{name}"
        if name in RESERVED_ENGINE_ARGS:
            found.append(f"{path}: is set by Tidegate or by the environment; remove it")
        elif known is not None and name not in known:
            found.append(unknown_key(path, model.engine_args[name], _engine_arg_paths(), key_paths(Settings)))
    return found


def _engine_arg_paths() -> set[str]:
    return {f"model.engine_args.{name}" for name in known_engine_args() or ()}


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


def api_key() -> str | None:
    """Return the API key that commands ask a gateway with: ``TIDEGATE_API_KEY``."""
    return os.environ.get("TIDEGATE_API_KEY", "").strip() or None


def grafana_access() -> tuple[str | None, str | None]:
    """Return address and token of the Grafana that boards are published to: ``GRAFANA_URL``, ``GRAFANA_TOKEN``."""
    url, token = (os.environ.get(name, "").strip() or None for name in ("GRAFANA_URL", "GRAFANA_TOKEN"))
    return url, token


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
