"""serve_config.yaml as a whole, checked strictly before anything starts.

Ray accepts unknown keys on its own level (on purpose, for forward compatibility), so a misplaced
``max_ongoing_requests`` would be dropped without a word. Here each level is compared with the fields of Ray's own
schemas, duplicate YAML keys are refused, and the ``args`` of Tidegate's application go through ``Settings.load``.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from deployments.controller_actor import OWNER_DEPLOYMENT
from deployments.settings import Settings, SettingsError
from deployments.settings_errors import key_paths, shown, unknown_key

IMPORT_PATH = "deployments.app:build"


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's safe loader, but a key that is written twice is an error and not the last one's silent win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[object, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            if isinstance(key, typing.Hashable) and key in seen:
                raise SettingsError([f"{key}: given twice, on line {seen[key]} and on line {line}; remove one"])
            if isinstance(key, typing.Hashable):
                seen[key] = line
        return super().construct_mapping(node, deep=deep)


def load_yaml(text: str) -> dict[str, Any]:
    """Return the mapping in ``text``.

    Raises:
        SettingsError: it is not YAML, not a mapping, or a key appears twice in one place.
    """
    try:
        loaded = yaml.load(text, Loader=_UniqueKeyLoader)  # noqa: S506 (a subclass of SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise SettingsError([f"{where}not valid YAML: {getattr(error, 'problem', None) or error}"]) from None
    if not isinstance(loaded, dict):
        raise SettingsError([f"{shown(loaded)}: must be a mapping with 'applications'"])
    return loaded


def check_serve_config(path: Path) -> dict[str, Settings]:
    """Check the file at ``path`` and return the settings of each Tidegate application in it, by application name.

    Raises:
        SettingsError: one line per problem, each with its path in the file.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError([f"{path}: cannot be read: {error}"]) from None
    return check_config(load_yaml(text))


def check_config(config: Mapping[str, Any]) -> dict[str, Settings]:
    """Check the parsed content of a Serve configuration file. See ``check_serve_config``."""
    from ray.serve.schema import ServeDeploySchema

    serve_paths = set(_schema_paths(ServeDeploySchema, "", 0))
    own_paths = {f"applications.N.args.{path}" for path in key_paths(Settings)}
    problems = list(_unknown_keys(ServeDeploySchema, config, "", serve_paths | own_paths))
    if not problems:
        try:
            ServeDeploySchema.model_validate(config)
        except ValidationError as error:
            problems = [_serve_line(item) for item in error.errors(include_url=False)]
        except (ValueError, TypeError) as error:
            problems = [str(error)]
    found: dict[str, Settings] = {}
    for index, app in enumerate(_list(config.get("applications"))):
        if isinstance(app, Mapping) and app.get("import_path") == IMPORT_PATH:
            try:
                settings = found[str(app.get("name", "default"))] = Settings.load(app.get("args"), serve_paths)
            except SettingsError as error:
                problems += [f"applications.{index}.{_below_args(line)}" for line in error.problems]
            else:
                problems += [f"applications.{index}.{line}" for line in _user_configs(settings, app)]
    if problems:
        raise SettingsError(problems)
    if not found:
        raise SettingsError([f"applications: none has import_path '{IMPORT_PATH}'"])
    return found


def _user_configs(settings: Settings, app: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each ``user_config`` that would be refused, or would change nothing."""
    for index, deployment in enumerate(_list(app.get("deployments"))):
        given = deployment.get("user_config") if isinstance(deployment, Mapping) else None
        if given is None:
            continue
        path = f"deployments.{index}.user_config"
        if deployment.get("name") != OWNER_DEPLOYMENT:
            yield f"{path}: has no effect here; objectives that change while it runs belong to '{OWNER_DEPLOYMENT}'"
            continue
        try:
            settings.with_objectives(given)
        except SettingsError as error:
            for line in error.problems:
                yield path + (line.removeprefix("user_config") if line.startswith("user_config") else f".{line}")


def _below_args(line: str) -> str:
    return line if line.startswith("args: ") else f"args.{line}"


def _serve_line(item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"]) or "file"
    return f"{path}: {shown(item['input'])}: {str(item['msg']).removeprefix('Value error, ')}"


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _free_form() -> dict[str, type[BaseModel]]:
    """Ray's models of keys that its schema types as plain dictionaries."""
    from ray.serve import config, schema

    return {
        "autoscaling_config": config.AutoscalingConfig,
        "autoscaling_policy": config.AutoscalingPolicy,
        "request_router_config": config.RequestRouterConfig,
        "gang_scheduling_config": config.GangSchedulingConfig,
        "deployment_actors": config.DeploymentActorConfig,
        "logging_config": schema.LoggingConfig,
    }


def _model_of(name: str, annotation: Any) -> type[BaseModel] | None:
    """Return the model whose fields are the keys below ``name``; ``None`` where any key may stand."""
    special = _free_form().get(name)
    if special is not None:
        return special
    for kind in (annotation, *typing.get_args(annotation)):
        for inner in (kind, *typing.get_args(kind)):
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                return inner
    return None


def _unknown_keys(model: type[BaseModel], values: Any, path: str, valid: set[str]) -> Iterator[str]:
    """Yield a line for each key below ``values`` that is no field of its model."""
    if isinstance(values, list):
        for index, value in enumerate(values):
            yield from _unknown_keys(model, value, f"{path}{index}.", valid)
        return
    if not isinstance(values, Mapping):
        return
    fields = {field.alias or name: (name, field) for name, field in model.model_fields.items()}
    for key, value in values.items():
        if key not in fields:
            yield unknown_key(f"{path}{key}", value, [f"{path}{name}" for name in fields], valid)
            continue
        name, field = fields[key]
        inner = _model_of(name, field.annotation)
        if inner is not None:
            yield from _unknown_keys(inner, value, f"{path}{key}.", valid)


def _schema_paths(model: type[BaseModel], prefix: str, depth: int) -> Iterator[str]:
    """Yield every key of the file, with ``N`` for a position in a list."""
    for name, field in model.model_fields.items():
        key = field.alias or name
        yield f"{prefix}{key}"
        inner = _model_of(name, field.annotation)
        if inner is not None and depth < 4:
            is_list = "List" in str(field.annotation) or name == "deployment_actors"
            yield from _schema_paths(inner, f"{prefix}{key}." + ("N." if is_list else ""), depth + 1)
