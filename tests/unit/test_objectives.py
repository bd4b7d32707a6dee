"""Objectives per model and class: which one counts, what contradicts itself, and who follows a change."""

from __future__ import annotations

from typing import Any

import pytest

from deployments.settings import Settings, SettingsError
from policies.config import ClassConfig, ClassesConfig, ObjectivesConfig, PolicyConfig
from policies.config_base import ConfigError
from policies.config_objectives import ModelObjectives, ObjectivesPart
from policies.objectives import for_model, objectives_for
from policies.types import Priority

CONFIG = PolicyConfig(
    objectives=ObjectivesConfig(
        ttft_ms=1_000,
        itl_ms=100,
        models={"m": ModelObjectives(ttft_ms=2_000, itl_ms=80, classes={"batch": ObjectivesPart(ttft_ms=9_000)})},
    ),
    classes=ClassesConfig(
        standard=ClassConfig(ttft_ms=3_000, availability=0.9), batch=ClassConfig(ttft_ms=60_000, e2e_ms=90_000)
    ),
)


@pytest.mark.parametrize(
    ("model", "priority", "ttft_ms", "itl_ms", "e2e_ms", "availability"),
    [
        ("other", Priority.INTERACTIVE, 1_000, 100, None, 0.99),  # nothing of its own
        ("other", Priority.STANDARD, 3_000, 100, None, 0.9),  # the class wins over the rest
        ("m", Priority.INTERACTIVE, 2_000, 80, None, 0.99),  # the model wins over the rest
        ("m", Priority.STANDARD, 3_000, 80, None, 0.9),  # the class wins over the model
        ("m", Priority.BATCH, 9_000, 80, 90_000, 0.99),  # the class of the model wins over the class
    ],
)
def test_the_nearest_objective_counts(
    model: str, priority: Priority, ttft_ms: float, itl_ms: float, e2e_ms: float | None, availability: float
) -> None:
    found = objectives_for(CONFIG, model, priority)
    assert (found.ttft_ms, found.itl_ms, found.e2e_ms, found.availability) == (ttft_ms, itl_ms, e2e_ms, availability)


@pytest.mark.parametrize("model", ["m", "other"])
def test_writing_the_models_objectives_into_the_configuration_changes_no_answer(model: str) -> None:
    once = for_model(CONFIG, model)
    assert for_model(once, model) == once
    for priority in Priority:
        assert objectives_for(once, model, priority) == objectives_for(CONFIG, model, priority)
    assert once.objectives.ttft_ms == (2_000 if model == "m" else 1_000)
    assert once.objectives.models == {}  # it may be read as the configuration of any model
    assert once.classes.batch.ttft_ms == (9_000 if model == "m" else 60_000)


@pytest.mark.parametrize("part", [{"ttft_ms": 0.0}, {"itl_ms": -1.0}, {"quantile": 1.0}, {"availability": 0.4}])
def test_a_part_out_of_range_is_refused(part: dict[str, float]) -> None:
    for kind in (ObjectivesPart, ModelObjectives, ClassConfig):
        with pytest.raises(ConfigError, match=next(iter(part))):
            kind(**part)  # type: ignore[arg-type]  # one float field


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"objectives": {"e2e_ms": 1_000}}, "classes.interactive.e2e_ms: 1000: is below the class's ttft_ms (2000)"),
        (
            {"classes": {"batch": {"ttft_ms": 60_000, "e2e_ms": 50_000}}},
            "classes.batch.e2e_ms: 50000: is below the class's ttft_ms",
        ),
        ({"objectives": {"models": {"x": {"ttft_ms": 5}}}}, "objectives.models.x: has no effect"),
        ({"objectives": {"models": {"m": {"classes": {"bulk": {}}}}}}, "is no class; there are: interactive"),
        ({"objectives": {"models": {"m": {"ttft": 5}}}}, "objectives.models.m.ttft: 5: unknown key"),
        ({"objectives": {"ttft_ms": 700_000}}, "is above gateway.first_byte_timeout_ms (600000)"),
        ({"classes": {"batch": {"e2e_ms": 4e6}}}, "is above gateway.total_timeout_ms (3.6e+06)"),
    ],
)
def test_objectives_that_cannot_be_kept_are_refused_with_the_path(args: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.load({"model": {"name": "m"}, **args})
    assert any(words in problem for problem in caught.value.problems), caught.value.problems


def test_settings_steer_by_the_objectives_of_the_model_they_serve() -> None:
    settings = Settings.load(
        {"model": {"name": "m"}, "objectives": {"models": {"m": {"itl_ms": 50, "classes": {"batch": {"itl_ms": 500}}}}}}
    )
    config = settings.policy_config()
    assert (config.objectives.itl_ms, config.classes.batch.itl_ms, config.objectives.ttft_ms) == (50, 500, 2_000)


# --- user_config ------------------------------------------------------------------------------------------------------


def test_a_user_config_is_laid_over_the_settings_key_by_key() -> None:
    settings = Settings.load({"objectives": {"itl_ms": 90}, "classes": {"batch": {"ttft_ms": 40_000}}})
    changed = settings.with_objectives({"objectives": {"ttft_ms": 700}, "classes": {"batch": {"quantile": 0.8}}})
    config = changed.policy_config()
    assert (config.objectives.ttft_ms, config.objectives.itl_ms) == (700, 90)
    assert (config.classes.batch.ttft_ms, config.classes.batch.quantile) == (40_000, 0.8)
    assert settings.with_objectives(None) == settings.with_objectives({}) == settings


@pytest.mark.parametrize(
    ("user_config", "words"),
    [
        ({"scaling": {"replicas_max": 9}}, "user_config.scaling: only objectives and classes"),
        ([1], "user_config: [1]: must be a section"),
        ({"objectives": {"ttft_ms": "fast"}}, "objectives.ttft_ms"),
        ({"objectives": {"e2e_ms": 10}}, "e2e_ms: 10: is below"),
        ({"objectives": None}, "objectives"),
    ],
)
def test_another_user_config_is_refused(user_config: Any, words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.load({}).with_objectives(user_config)
    assert any(words in problem for problem in caught.value.problems), caught.value.problems
