"""Settings of further models that the application serves: section ``models`` of serve_config.yaml's ``args``.

Part of ``deployments/settings.py``, which checks the whole; import its names from there.

Whatever serves one model (its engines, its control loop, its part of a gateway) is given the settings *as seen from*
that model (:func:`seen_from`): its own sections stand at the top, the other models are below ``models``. So none of
them has to know that there are several.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from autoscaling.share import Caps, Claim
from deployments.settings_engine import ModelSettings, Strict, check_name
from policies.config import BatchingConfig, ScalingConfig
from policies.config_guard import DisaggregationConfig, SpeculationConfig

if TYPE_CHECKING:
    from deployments.settings import Settings

MODELS_MAX = 32
"""Models beside the first one."""
MAIN_DEPLOYMENT = "Engine"
"""Serve deployment of the first model's engines; those of others are ``Engine-<name>``."""


class ModelEntry(Strict):
    """One more model: its key in ``models`` is the name clients ask for. A section left out is the application's."""

    model: ModelSettings
    scaling: ScalingConfig | None = None
    batching: BatchingConfig | None = None
    speculation: SpeculationConfig | None = None
    disaggregation: DisaggregationConfig | None = None
    replica_usd_per_hour: float | None = Field(default=None, ge=0)
    """What one of its replicas costs; ``None``: as ``prices`` says."""


class FleetSettings(Strict):
    """What all models together may hold. ``None``: no bound. The first replica of each is always within."""

    gpus_max: float | None = Field(default=None, ge=0)
    """GPUs of all replicas (``model.num_gpus`` of each)."""
    usd_per_hour_max: float | None = Field(default=None, ge=0)
    """Price of all replicas (``prices.replica_usd_per_hour``, or a model's own)."""
    priorities: dict[str, int] = Field(default_factory=dict)
    """By model; a larger number comes first when a cap binds, 0 where none is named."""

    @property
    def caps(self) -> Caps:
        """The bounds."""
        return Caps(self.gpus_max, self.usd_per_hour_max)


def named(models: Mapping[str, ModelEntry]) -> dict[str, ModelEntry]:
    """``models`` with the name of each in its section ``model``. Raises ``ValueError`` for two names of one model."""
    if len(models) > MODELS_MAX:
        raise ValueError(f"are {len(models)}, and at most {MODELS_MAX} are served beside the first")
    found = {}
    for name, entry in models.items():
        try:
            check_name(name)
        except ValueError as error:
            raise ValueError(f"{name[:140]!r}: {error}") from None
        given = entry.model.name if "name" in entry.model.model_fields_set else name
        if given != name:
            raise ValueError(f"{name}.model.name: {given!r}: the model's name is its key here; remove it")
        found[name] = entry.model_copy(update={"model": entry.model.model_copy(update={"name": name})})
    return found


def seen_from(settings: Settings, name: str) -> Settings:
    """The same application, with the model ``name`` as its first one. Raises ``KeyError`` when it serves none such."""
    if name == settings.model.name:
        return settings
    part, own = file_part(name), _whole(settings, settings.models[name])
    first = ModelEntry(
        model=settings.model,
        scaling=settings.scaling,
        batching=settings.batching,
        speculation=settings.speculation,
        disaggregation=settings.disaggregation,
        replica_usd_per_hour=settings.prices.replica_usd_per_hour,
    )
    others = {other: _whole(settings, held) for other, held in settings.models.items() if other != name}
    usd = own.replica_usd_per_hour or 0.0
    update = {
        "model": own.model,
        "scaling": own.scaling,
        "batching": own.batching,
        "speculation": own.speculation,
        "disaggregation": own.disaggregation,
        "prices": dataclasses.replace(settings.prices, replica_usd_per_hour=usd),
        "models": {settings.model.name: first} | others,
        "ledger": settings.ledger.model_copy(update={"folder": _below(settings.ledger.folder, part)}),
        "recording": settings.recording.model_copy(update={"folder": _below(settings.recording.folder, part)}),
    }
    return settings.model_copy(update=update)


def _whole(settings: Settings, entry: ModelEntry) -> ModelEntry:
    """``entry`` with the application's sections where it has none of its own."""
    usd = entry.replica_usd_per_hour
    return ModelEntry(
        model=entry.model,
        scaling=entry.scaling or settings.scaling,
        batching=entry.batching or settings.batching,
        speculation=entry.speculation or settings.speculation,
        disaggregation=entry.disaggregation or settings.disaggregation,
        replica_usd_per_hour=settings.prices.replica_usd_per_hour if usd is None else usd,
    )


def _below(folder: str | None, part: str) -> str | None:
    return None if folder is None else f"{folder.rstrip('/')}/{part}"


def file_part(name: str) -> str:
    """A model's name as part of a file's or a deployment's."""
    return re.sub(r"[^A-Za-z0-9._-]", "-", name)


def deployments_of(settings: Settings) -> dict[str, str]:
    """Serve deployment of each model's engines, by the model's name; the first one first."""
    others = {name: f"{MAIN_DEPLOYMENT}-{file_part(name)}" for name in settings.models}
    return {settings.model.name: MAIN_DEPLOYMENT} | others


def each_of(settings: Settings) -> list[Settings]:
    """The application as seen from each of its models, the first one first."""
    return [settings.of(name) for name in deployments_of(settings)]


def drain_s_max(settings: Settings) -> float:
    """Longest time a replica of any model may drain, in seconds."""
    return max(each.model.drain_s_max for each in each_of(settings))


def claim_of(settings: Settings, name: str, asks: int, held: int) -> Claim:
    """The part of one model in the sharing of the caps, where its load asks for ``asks`` and it has ``held``.

    ``settings``: as the model sees them. Room for its first replica is kept even while it sleeps: to be woken it cannot
    wait until another model has drained.
    """
    scaling = settings.scaling
    return Claim(
        asks=asks,
        held=held,
        least=max(1, scaling.replicas_min),
        most=scaling.replicas_max,
        gpus=settings.model.num_gpus,
        usd_per_hour=settings.prices.replica_usd_per_hour,
        priority=settings.fleet.priorities.get(name, 0),
    )


def clashes(settings: Settings) -> Iterator[str]:
    """Lines for models that cannot be told apart, or do not fit together."""
    if settings.model.name in settings.models:
        yield f"models.{settings.model.name}: is the name of the first model already (model.name)"
    seen: dict[str, str] = {}
    for name in settings.models:
        part = file_part(name)
        if part in seen:
            yield f"models.{name}: would share files and deployment with {seen[part]!r}; rename one"
        seen[part] = name
    names = deployments_of(settings)
    fleet = settings.fleet
    yield from (f"fleet.priorities.{name}: no such model is served" for name in fleet.priorities if name not in names)
    claims = {each.model.name: claim_of(each, each.model.name, 0, 0) for each in each_of(settings)}
    if not fleet.caps.allow(claims, {name: claim.least for name, claim in claims.items()}):
        yield "fleet: the first replicas of all models, or their replicas_min, are above gpus_max or usd_per_hour_max"
