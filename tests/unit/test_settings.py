from __future__ import annotations

import dataclasses
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest

from deployments import settings as settings_module
from deployments.engine_arguments import engine_arg_names, names_in
from deployments.key_file import KEYS_MAX
from deployments.settings import Settings, SettingsError
from deployments.settings_engine import RESERVED_ENGINE_ARGS
from deployments.settings_errors import VALUE_CHARS_MAX, key_paths, nearest, shown, unit_of
from policies.config import PolicyConfig, RoutingConfig
from policies.types import Mode


def problems(args: Any) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        Settings.load(args)
    return list(caught.value.problems)


def only(args: Any) -> str:
    found = problems(args)
    assert len(found) == 1, found
    return found[0]


def test_no_arguments_give_the_defaults_of_the_policies() -> None:
    assert Settings.load({}).policy_config() == PolicyConfig()
    assert Settings.load(None) == Settings.load({})


def test_every_family_of_the_policy_config_is_a_section_and_reaches_it() -> None:
    for family in dataclasses.fields(PolicyConfig):
        assert family.name in Settings.model_fields or family.name == "gateways"
    assert Settings.load({"gateway": {"replicas": 3}}).policy_config().gateways == 3
    loaded = Settings.load(
        {"routing": {"block_bytes": 512, "step_prior": {"a_ms": 1, "b_ms": 2, "c_ms": 3, "d_ms": 4}}}
    )
    assert loaded.policy_config().routing.block_bytes == 512
    assert loaded.policy_config().routing.step_prior.d_ms == 4.0


def test_arguments_survive_the_way_to_another_process() -> None:
    args = {
        "model": {"engine": "emulated", "emulated": {"faults": {"kind": "cut", "after_tokens": 3}}},
        "control": {"mode": "shadow"},
        "scaling": {"replicas_min": 2, "replicas_max": 5},
    }
    settings = Settings.load(args)
    assert Settings.load(settings.to_args()) == settings
    assert settings.control.mode is Mode.SHADOW


def test_settings_do_not_change_after_load() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings.load({}).model.num_cpus = 3  # type: ignore[misc]


# --- unknown keys -----------------------------------------------------------------------------------------------------


def test_a_slip_names_the_nearest_key_of_its_section() -> None:
    assert only({"scaling": {"replica_max": 4}}) == "scaling.replica_max: 4: unknown key; did you mean 'replicas_max'?"


def test_a_misplaced_key_is_told_where_it_belongs() -> None:
    assert only({"scaling": {"tick_ms": 500}}).endswith("unknown key; it belongs at 'control.tick_ms'")


def test_a_misspelt_section_names_the_nearest() -> None:
    assert "did you mean 'control'?" in only({"contrl": {"tick_ms": 500}})


def test_a_key_like_no_other_lists_what_its_section_has() -> None:
    line = only({"faults": {"zzz": 1}})
    assert line.startswith("faults.zzz: 1: unknown key; valid keys here: attempts_max, ")


def test_keys_are_strict_inside_nested_dataclasses_too() -> None:
    line = only({"routing": {"step_prior": {"a_ms": 1, "b_ms": 1, "c_ms": 1, "d_ms": 1, "e_ms": 1}}})
    assert line.startswith("routing.step_prior.e_ms: 1: unknown key")


def test_all_problems_are_told_at_once() -> None:
    assert len(problems({"scaling": {"x": 1}, "control": {"mode": "maybe"}, "gateway": {"replicas": 0}})) == 3


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["30s", "30", "", None, True, [30]])
def test_a_unit_or_a_wrong_type_is_refused_with_the_expected_unit(value: object) -> None:
    line = only({"model": {"stuck_after_s": value}})
    assert line.startswith(f"model.stuck_after_s: {shown(value)}: must be a number in seconds")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none_are_refused(value: float) -> None:
    assert "must be a finite number in milliseconds" in only({"objectives": {"ttft_ms": value}})


@pytest.mark.parametrize("value", [2.5, "2", True])
def test_whole_numbers_stay_whole(value: object) -> None:
    assert "must be a whole number" in only({"faults": {"attempts_max": value}})


def test_a_whole_number_may_stand_for_a_fractional_one() -> None:
    assert Settings.load({"objectives": {"ttft_ms": 500}}).objectives.ttft_ms == 500.0


def test_a_minimum_above_its_maximum_is_refused_with_both() -> None:
    line = only({"scaling": {"replicas_min": 3, "replicas_max": 2}})
    assert line == "scaling.replicas_max: 2: must not be below replicas_min (3)"


@pytest.mark.parametrize(
    ("sections", "line"),
    [
        (
            {"scaling": {"replicas_min": 0, "enabled": False}},
            "scaling.replicas_min: 0: needs scaling.enabled, without which nobody wakes the model",
        ),
        (
            {"scaling": {"replicas_min": 0, "hold_s_max": 90}, "gateway": {"total_timeout_ms": 60_000}},
            "scaling.hold_s_max: 90: is above gateway.total_timeout_ms (60 s)",
        ),
        (
            {"scaling": {"zero_after_s": 30}},
            "scaling.zero_after_s: has no effect because replicas_min is not 0; remove it or change that",
        ),
        ({"scaling": {"replicas_min": -1}}, "scaling.replicas_min: -1: must not be negative"),
        ({"scaling": {"replicas_min": 0, "replicas_max": 0}}, "scaling.replicas_max: 0: must be at least 1"),
    ],
)
def test_scale_to_zero_needs_what_it_needs(sections: dict[str, Any], line: str) -> None:
    assert only(sections) == line


def test_a_minimum_above_the_default_maximum_shows_the_default() -> None:
    line = only({"scaling": {"replicas_min": 3}})
    assert line == "scaling.replicas_max: must not be below replicas_min (3), is 2"


def test_a_wrong_choice_names_the_choices_and_the_nearest() -> None:
    line = only({"model": {"engine": "vlm"}})
    assert line == "model.engine: 'vlm': must be 'vllm' or 'emulated'; did you mean 'vllm'?"


@pytest.mark.parametrize("value", [None, 3, [], "x"])
def test_a_section_must_be_a_section(value: object) -> None:
    assert "must be a section" in only({"gateway": value})


@pytest.mark.parametrize("args", [3, "x", [1]])
def test_the_arguments_themselves_must_be_a_section(args: object) -> None:
    assert "must be a section" in only(args)


@pytest.mark.parametrize("name", ["", "a b", "x" * 129, "a\nb", "-a", 'a"b'])
def test_model_names_are_printable_and_short(name: str) -> None:
    assert only({"model": {"name": name}}).startswith("model.name: ")


def test_a_long_value_is_shown_short() -> None:
    assert len(shown("x" * 10_000)) == VALUE_CHARS_MAX


# --- together ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "path"),
    [
        ({"model": {"emulated": {"kv_blocks": 9}}}, "model.emulated"),
        ({"model": {"engine": "emulated", "engine_args": {"dtype": "bfloat16"}}}, "model.engine_args"),
        ({"model": {"device": "gpu", "num_gpus": 1, "cpu": {"threads": 2}}}, "model.cpu"),
        ({"batching": {"enabled": False, "settle_ticks": 1}}, "batching"),
        ({"affinity": {"enabled": False, "step": 0.2}}, "affinity"),
    ],
)
def test_a_section_for_what_is_switched_off_is_refused(args: dict[str, Any], path: str) -> None:
    assert only(args).startswith(f"{path}: has no effect because ")


def test_switching_off_alone_is_fine() -> None:
    assert Settings.load({"batching": {"enabled": False}, "affinity": {"enabled": False}}).batching.enabled is False


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"device": "gpu"}, "model.num_gpus"),
        ({"num_gpus": 1}, "model.num_gpus"),
        ({"accelerator_type": "H100"}, "model.accelerator_type"),
    ],
)
def test_device_and_resources_must_agree(model: dict[str, Any], key: str) -> None:
    assert only({"model": model}).startswith(f"{key}: ")


# --- API keys ---------------------------------------------------------------------------------------------------------

KEY_RECORD = {
    "id": "k1", "tenant": "acme", "scopes": ["inference"], "salt": "0" * 32, "hash": "1" * 64,
    "created": "2026-11-30T12:00:00Z",
}  # fmt: skip


def test_keys_are_needed_unless_the_configuration_says_none() -> None:
    assert Settings.load({}).auth.required
    assert Settings.load({"auth": {}}).auth.required
    assert not Settings.load({"auth": "none"}).auth.required


@pytest.mark.parametrize("auth", ["none", {}, {"keys_file": "/a/keys.jsonl"}, {"keys": [KEY_RECORD]}])
def test_authentication_survives_the_way_to_another_process(auth: Any) -> None:
    settings = Settings.load({"auth": auth})
    assert Settings.load(settings.to_args()) == settings
    assert settings.to_args()["auth"] == auth or auth != "none"


@pytest.mark.parametrize("auth", [None, "None", "NONE", "off", "", False, 0, [], ["none"], "none "])
def test_nothing_but_the_word_none_switches_authentication_off(auth: Any) -> None:
    assert "must be the word none, or a section" in only({"auth": auth})


def test_authentication_cannot_be_switched_off_from_inside_its_section() -> None:
    for name in ("none", "_none", "required", "enabled"):
        assert "unknown key" in only({"auth": {name: False}})


def test_without_authentication_only_this_host_is_answered() -> None:
    assert only({"auth": "none", "gateway": {"clients": "any"}}).startswith("gateway.clients: 'any': needs API keys")
    assert Settings.load({"gateway": {"clients": "any"}}).auth.required


@pytest.mark.parametrize("name", ["", "a b", "-x", "ä", "x" * 65, "a\n"])
def test_a_tenants_name_must_be_one_that_a_key_can_have(name: str) -> None:
    assert "must be 1 to 64 letters" in only({"tenants": {name: {}}})


def test_a_budget_without_prices_is_refused_because_nothing_would_ever_be_spent() -> None:
    tenants = {"acme": {"budget_usd_max": 5}}
    assert only({"tenants": tenants}).startswith("tenants.acme.budget_usd_max: has no effect")
    assert Settings.load({"tenants": tenants, "prices": {"output_usd_per_mtok": 1}}).tenants["acme"].budget_usd_max == 5


@pytest.mark.parametrize(
    ("auth", "path"),
    [
        ({"keys_file": "keys.jsonl"}, "auth.keys_file"), ({"keys_file": ""}, "auth.keys_file"),
        ({"keys_file": 3}, "auth.keys_file"), ({"keys_file": "/a\0b"}, "auth.keys_file"),
        ({"keys": {}}, "auth.keys"), ({"keys": [KEY_RECORD, KEY_RECORD]}, "auth.keys"),
        ({"keys": [KEY_RECORD | {"hash": "1"}]}, "auth.keys.0.hash"),
        ({"keys": [KEY_RECORD | {"scopes": ["all"]}]}, "auth.keys.0.scopes"),
        ({"keys": [{k: v for k, v in KEY_RECORD.items() if k != "salt"}]}, "auth.keys.0.salt"),
    ],
)  # fmt: skip
def test_wrong_settings_of_authentication_are_named(auth: Any, path: str) -> None:
    assert only({"auth": auth}).startswith(f"{path}: ")


@pytest.mark.parametrize(
    "args",
    [
        {"auth": "tg-abc-hush"}, {"auth": ["tg-abc-hush"]}, {"auth": {"keys": ["tg-abc-hush"]}},
        {"auth": {"keys": "hush"}}, {"auth": {"key": "hush"}}, {"auth": {"keys": [KEY_RECORD | {"secret": "hush"}]}},
        {"auth": {"keys": [KEY_RECORD | {"hash": "hush"}]}}, {"auth": {"keys_file": "hush"}},
        {"gateway": {"api_key": "tg-abc-hush"}}, {"model": {"name": "tg-abc-hush?"}},
    ],
)  # fmt: skip
def test_a_key_in_the_wrong_place_is_not_repeated_in_the_error(args: Any) -> None:
    assert "hush" not in only(args)


@pytest.mark.slow
def test_more_keys_than_the_bound_are_refused() -> None:
    many = [KEY_RECORD | {"id": f"k{n}"} for n in range(KEYS_MAX + 1)]
    assert len(Settings.load({"auth": {"keys": many[:-1]}}).auth.keys) == KEYS_MAX
    assert only({"auth": {"keys": many}}).startswith("auth.keys: ")


# --- arguments of vLLM ------------------------------------------------------------------------------------------------

needs_vllm = pytest.mark.skipif(engine_arg_names() is None, reason="vLLM is not installed")


@needs_vllm
def test_engine_arguments_are_checked_against_the_installed_vllm() -> None:
    line = only({"model": {"engine_args": {"max_model_lenn": 2048}}})
    assert line == "model.engine_args.max_model_lenn: 2048: unknown key; did you mean 'max_model_len'?"


@needs_vllm
def test_an_engine_argument_in_the_wrong_place_is_told_where_it_belongs() -> None:
    assert "it belongs at 'model.engine_args.max_model_len'" in only({"model": {"max_model_len": 2048}})


@pytest.mark.parametrize("name", sorted(RESERVED_ENGINE_ARGS))
def test_what_tidegate_sets_itself_is_refused(name: str) -> None:
    assert "is set by Tidegate" in only({"model": {"engine_args": {name: "x"}}})


def test_argument_names_come_from_the_annotated_fields() -> None:
    source = (
        "class EngineArgs:\n  a: int = 1\n  _b: int = 2\n  c = 3\nclass AsyncEngineArgs(EngineArgs):\n  d: int\nx: int"
    )
    assert names_in(source) == {"a", "d"}


# --- words ------------------------------------------------------------------------------------------------------------


def test_every_numeric_key_with_a_unit_says_it() -> None:
    assert unit_of("ttft_ms") == "in milliseconds"
    assert unit_of("drain_s_max") == "in seconds"
    assert unit_of("body_bytes_max") == "in bytes"
    assert unit_of("replicas") == ""


def test_paths_of_the_tree_include_sections_and_nested_fields() -> None:
    assert {"model", "model.emulated.faults.kind", "routing.step_prior.a_ms"} <= key_paths(Settings)
    assert {f"routing.{field.name}" for field in dataclasses.fields(RoutingConfig)} <= key_paths(Settings)


def test_nearest_prefers_the_own_section_over_an_equal_match_elsewhere() -> None:
    assert nearest("a.replicas_mx", {"a.replicas_max", "b.replicas_max"}) == "did you mean 'replicas_max'?"
    assert nearest("x.y", set()) == "nothing like it exists"


def test_the_error_keeps_its_lines_across_processes() -> None:
    error = pickle.loads(pickle.dumps(SettingsError(["a: 1", "b: 2"])))
    assert error.problems == ("a: 1", "b: 2")
    assert str(error) == "a: 1\nb: 2"


# --- environment ------------------------------------------------------------------------------------------------------


def test_the_cache_folder_follows_its_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TIDEGATE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert settings_module.cache_dir() == tmp_path / ".cache" / "tidegate"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert settings_module.cache_dir() == Path("/x/tidegate")
    monkeypatch.setenv("TIDEGATE_CACHE", "/y")
    assert settings_module.cache_dir() == Path("/y")


def test_rays_token_is_made_once_and_only_for_its_owner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "below" / "token"))
    token = settings_module.ray_token()
    assert len(token) == 64
    assert settings_module.ray_token() == token
    assert stat.S_IMODE((tmp_path / "below" / "token").stat().st_mode) == 0o600
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    assert settings_module.ray_token() == "given"
