from __future__ import annotations

from pathlib import Path

import pytest

from deployments.config_file import check_config, check_serve_config, load_yaml
from deployments.settings import SettingsError

ROOT = Path(__file__).resolve().parents[2]

HEAD = """
http_options: {host: 127.0.0.1, port: 8000}
applications:
- name: tidegate
  route_prefix: /
  import_path: deployments.app:build
"""


def problems(text: str) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        check_config(load_yaml(text))
    return list(caught.value.problems)


def only(text: str) -> str:
    found = problems(text)
    assert len(found) == 1, found
    return found[0]


def test_the_shipped_file_is_valid_and_small() -> None:
    settings = check_serve_config(ROOT / "serve_config.yaml")["tidegate"]
    assert settings.model.engine == "vllm"
    assert settings.model.engine_args == {"enforce_eager": True, "max_model_len": 2048}
    assert settings.gateway.clients == "loopback"
    assert (settings.scaling.replicas_min, settings.scaling.replicas_max) == (1, 2)


def test_the_shipped_file_explains_each_of_its_keys() -> None:
    lines = (ROOT / "serve_config.yaml").read_text(encoding="utf-8").splitlines()
    bare = [
        line
        for line in lines
        if ": " in line and "#" not in line.partition(": ")[2] and not line.lstrip().startswith("#")
    ]
    explained_elsewhere = (
        "host",
        "name: tidegate",
        "route_prefix",
        "import_path",
        "dtype",
        "replicas_min",
        "replicas_max",
    )
    assert [line for line in bare if not line.strip().lstrip("- ").startswith(explained_elsewhere)] == []


def test_a_serve_key_in_the_wrong_place_is_refused_although_ray_would_drop_it() -> None:
    line = only(HEAD + "  deployments:\n  - name: Gateway\n    autoscaling_config: {max_ongoing_requests: 3}\n")
    assert line == (
        "applications.0.deployments.0.autoscaling_config.max_ongoing_requests: 3: unknown key; "
        "it belongs at 'applications.N.deployments.N.max_ongoing_requests'"
    )


def test_a_serve_key_among_our_arguments_is_told_where_it_belongs() -> None:
    line = only(HEAD + "  args: {max_ongoing_requests: 3}\n")
    assert line.startswith("applications.0.args.max_ongoing_requests: 3: ")
    assert "applications.N.deployments.N.max_ongoing_requests" in line


def test_our_key_on_serves_level_is_told_where_it_belongs() -> None:
    assert only(HEAD + "tick_ms: 500\n").endswith("it belongs at 'applications.N.args.control.tick_ms'")


@pytest.mark.parametrize(
    ("slip", "nearest"),
    [
        ("http_option: {port: 1}", "http_options"),
        ("proxy_locaton: HeadOnly", "proxy_location"),
        ("logging_config: {log_levle: INFO}", "log_level"),
    ],
)
def test_slips_on_serves_level_name_the_nearest_key(slip: str, nearest: str) -> None:
    assert f"did you mean '{nearest}'?" in only(HEAD + slip + "\n")


@pytest.mark.parametrize(
    "section",
    [
        "request_router_config: {request_router_clas: a:b}",
        "autoscaling_config: {policy: {policy_functoin: a:b}}",
        "ray_actor_options: {num_cpu: 1}",
        "backpressure_config: {statuscode: 1}",
    ],
)
def test_keys_of_deployments_are_checked_at_every_depth(section: str) -> None:
    assert "unknown key" in only(HEAD + f"  deployments:\n  - name: Engine\n    {section}\n")


def test_free_sections_take_any_key() -> None:
    deployment = "{name: Engine, ray_actor_options: {resources: {any: 1}}}"
    text = HEAD + f"  runtime_env: {{env_vars: {{ANY: thing}}}}\n  deployments:\n  - {deployment}\n"
    assert list(check_config(load_yaml(text))) == ["tidegate"]


def test_serves_own_value_checks_speak_too() -> None:
    assert only(HEAD.replace("8000", "eight")).startswith("http_options.port: 'eight': ")


def test_serves_and_our_problems_come_together() -> None:
    found = problems(HEAD + "  rout_prefix: x\n  args: {scaling: {replica_max: 2}}\n")
    assert [line.split(":")[0] for line in found] == [
        "applications.0.rout_prefix",
        "applications.0.args.scaling.replica_max",
    ]


@pytest.mark.parametrize(
    "text",
    [
        HEAD + "  args:\n    scaling: {replicas_max: 2, replicas_max: 3}\n",
        HEAD + "  args: {}\n  args: {}\n",
        HEAD + "http_options: {}\n",
    ],
)
def test_a_key_given_twice_is_refused_with_both_lines(text: str) -> None:
    assert "given twice, on line " in only(text)


def test_a_merge_key_is_no_duplicate() -> None:
    loaded = load_yaml("base: &b {x: 1}\nuse: {<<: *b, y: 2}\n")
    assert loaded["use"] == {"x": 1, "y": 2}


@pytest.mark.parametrize("text", ["", "x", "3", "- a", "null"])
def test_what_is_no_mapping_is_refused(text: str) -> None:
    assert "must be a mapping" in only(text)


@pytest.mark.parametrize("text", ["a: [", "a: b: c", "\tx: 1", "a: 'x"])
def test_broken_yaml_says_where(text: str) -> None:
    line = only(text)
    assert "not valid YAML" in line
    assert line.startswith(("line 1, column ", "line 2, column "))


@pytest.mark.parametrize("text", ["!!python/object/apply:os.system ['true']", "a: !!python/name:os.system"])
def test_yaml_builds_no_objects(text: str) -> None:
    assert "not valid YAML" in only(text)


def test_a_file_without_our_application_is_refused() -> None:
    assert "none has import_path 'deployments.app:build'" in only("applications: []\n")


def test_arguments_that_are_no_section_are_refused() -> None:
    assert any("args: 3" in line for line in problems(HEAD + "  args: 3\n"))


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read") as caught:
        check_serve_config(tmp_path / "no.yaml")
    assert len(caught.value.problems) == 1
