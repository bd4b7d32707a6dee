"""Which objectives hold for a request: those of its class and model, put together from the configuration.

For each of TTFT, token gap, whole answer, quantile and availability the first that is given counts::

    objectives.models.MODEL.classes.CLASS     the class of this model
    classes.CLASS                             the class, whatever the model
    objectives.models.MODEL                   the model, whatever the class
    objectives                                everything else

:func:`for_model` writes the answer back into a configuration, so that whoever reads ``config.objectives`` or
``config.classes`` steers by the model's own; doing it twice changes nothing.

What this must not do: judge a request, or know which models are served.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from policies.config import ClassConfig, ClassesConfig, ObjectivesConfig, PolicyConfig
from policies.config_objectives import ModelObjectives, ObjectivesPart
from policies.types import Priority

FIELDS = ("ttft_ms", "itl_ms", "e2e_ms", "quantile", "availability")
"""What can be promised for a part of the traffic."""

_NO_MODEL = ModelObjectives()
_NO_PART = ObjectivesPart()


def objectives_for(config: PolicyConfig, model: str, priority: Priority) -> ObjectivesConfig:
    """The objectives of requests of one class for ``model``. Look it up once, not per request: it builds a value."""
    of_model = config.objectives.models.get(model, _NO_MODEL)
    parts = (of_model.classes.get(priority.value, _NO_PART), config.classes.of(priority), of_model)
    return replace(config.objectives, models={}, **_given(*parts))


def for_model(config: PolicyConfig, model: str) -> PolicyConfig:
    """``config`` with the objectives of ``model`` in ``objectives`` and ``classes``, and of no other one."""
    of_model = config.objectives.models.get(model, _NO_MODEL)
    classes = {p.value: _class_of(config.classes.of(p), of_model.classes.get(p.value, _NO_PART)) for p in Priority}
    objectives = replace(config.objectives, models={}, **_given(of_model))
    return replace(config, objectives=objectives, classes=ClassesConfig(**classes))


def contradictions(config: PolicyConfig, model: str) -> Iterator[str]:
    """Lines ``path: value: why`` for promises that cannot be kept together, for every class of ``model``."""
    for priority in Priority:
        found = objectives_for(config, model, priority)
        if found.e2e_ms is None:
            continue
        path = f"classes.{priority.value}.e2e_ms: {found.e2e_ms:g}"
        if found.e2e_ms < found.ttft_ms:
            yield (
                f"{path}: is below the class's ttft_ms ({found.ttft_ms:g}): an answer cannot be whole before its first "
                "token; raise one of them for this class"
            )
        elif found.e2e_ms < found.itl_ms:
            yield f"{path}: is below the class's itl_ms ({found.itl_ms:g}); raise one of them for this class"


def _class_of(given: ClassConfig, part: ObjectivesPart) -> ClassConfig:
    return replace(given, **_given(part))


def _given(*parts: ObjectivesPart | ModelObjectives | ClassConfig) -> dict[str, Any]:
    """What ``parts`` say, the first that says something winning."""
    found: dict[str, Any] = {}
    for part in parts:
        for name in FIELDS:
            value = getattr(part, name)
            if value is not None:
                found.setdefault(name, value)
    return found
