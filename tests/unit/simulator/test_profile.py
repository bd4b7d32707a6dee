"""Engine profiles: what is refused and how it is told, the way to JSON and back, and the ones that ship."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autoscaling.simulator.profile import ProfileError, profile_from_json, profile_to_json, with_sources
from autoscaling.simulator.spec import EngineProfile, StepLaw
from deployments.simulation.profile_files import load_profile, profile_names, save_profile

LAW = {"a_ms": 10, "b_ms": 0.02, "c_ms": 0.05, "d_ms": 0.03}
GOOD: dict[str, Any] = {
    "name": "x", "gpu": "H100", "gpus": 2, "model": "m", "law": LAW, "kv_tokens": 1_000, "context_tokens_max": 4_096,
    "cold_start_ms": 60_000, "usd_per_gpu_hour": 2.5, "source": "measured",
}  # fmt: skip


def parse(**changes: Any) -> EngineProfile:
    data = {k: v for k, v in {**GOOD, **changes}.items() if v is not ...}
    return profile_from_json(json.dumps(data), "p.json")


def law(**changes: Any) -> dict[str, Any]:
    return {k: v for k, v in {**LAW, **changes}.items() if v is not ...}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"usd_per_gpu_hour": 0}, "p.json: usd_per_gpu_hour: must be above 0, is 0; without a price"),
        ({"usd_per_gpu_hour": -1.5}, "usd_per_gpu_hour: must be above 0, is -1.5"),
        ({"usd_per_gpu_hour": float("nan")}, "usd_per_gpu_hour: must be a finite number, is NaN"),
        ({"usd_per_gpu_hour": "2.5"}, 'usd_per_gpu_hour: must be a number, is "2.5"'),
        ({"kv_tokens": 0}, "kv_tokens: must be above 0, is 0; an engine without KV cache"),
        ({"kv_tokens": 10}, "kv_tokens: 10 are less than one block of 16"),
        ({"kv_tokens": 1000.5}, "kv_tokens: must be a whole number, is 1000.5"),
        ({"gpus": True}, "gpus: must be a whole number, is true"),
        ({"gpus": 0}, "gpus: must be above 0, is 0"),
        ({"cold_start_ms": float("inf")}, "cold_start_ms: must be a finite number, is Infinity"),
        ({"prefix_cache": 1}, "prefix_cache: must be true or false, is 1"),
        ({"model": " "}, 'model: must be a text that is not empty, is " "'),
        ({"kv_token": 5}, "kv_token: unknown key (value 5); did you mean kv_tokens?"),
        ({"qqqqqq": 5}, "qqqqqq: unknown key (value 5); known: name, gpu, gpus"),
        ({"law": law(d_mss=1)}, "law.d_mss: unknown key (value 1); did you mean d_ms?"),
        ({"law": law(d_ms=0)}, "law.d_ms: must be above 0, is 0"),
        ({"law": law(c_ms=-0.1)}, "law.c_ms: must be 0 or more, is -0.1"),
        ({"law": law(a_ms=0, b_ms=0)}, "law.a_ms: a_ms and b_ms must not both be 0"),
        ({"law": law(jitter_share=0.7)}, "law.jitter_share: must be below 0.5, is 0.7"),
        ({"law": law(b_ms=...)}, "law.b_ms: is missing"),
        ({"law": 5}, "law: must be an object"),
        ({"law": law(batch=[[4, 9], [2, 9]])}, "law.batch[1]: running must be whole, at least 1 and grow, is 2"),
        ({"law": law(batch=[[1, 9], [2, 8]])}, "law.batch[1]: ms must be above 0, and the last not below"),
        ({"law": law(batch=[[1, "9"]])}, 'law.batch[0]: must be [running, ms], is [1, "9"]'),
        ({"law": law(batch=7)}, "law.batch: must be a list of [running, ms], is 7"),
        ({"source": {"kv_tokenz": "x"}}, "source.kv_tokenz: no such figure; did you mean kv_tokens?"),
        ({"source": {"kv_tokens": ""}}, 'source.kv_tokens: must be a text of one line, is ""'),
        ({"source": ""}, "source: must be a text, or one text by field"),
        ({"gpu": ...}, "gpu: is missing"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_place(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ProfileError) as error:
        parse(**changes)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"name": "x",\n "gpu": }', "p.json:2: not JSON"),
        ("", "p.json:1: not JSON"),
        ("[1]", "p.json: must be an object with the fields of a profile, is [1]"),
        ('{"name": "x", "name": "y"}', "p.json: not JSON: key 'name' is given 2 times"),
        ("[" * 100_000, "p.json: not JSON"),
    ],
)
def test_what_is_no_profile_at_all_is_refused(text: str, words: str) -> None:
    with pytest.raises(ProfileError) as error:
        profile_from_json(text, "p.json")
    assert words in str(error.value)


def test_json_and_back_is_the_same_value() -> None:
    plain = parse(source="measured here, in one line: yes")
    table = parse(
        law=law(batch=[[1, 9.5], [8, 11], [64, 14.25]], e_ms=1.5, jitter_share=0.02),
        source={"law.batch": "a log", "kv_tokens": "the engine: its start"}, async_scheduling=True,
        reserve_full_prompt=False, kv_transfer_gb_s=12.5,
    )  # fmt: skip
    assert table.source == "law.batch: a log\nkv_tokens: the engine: its start"
    for profile in (plain, table):
        text = profile_to_json(profile)
        assert profile_from_json(text, "again") == profile
        assert profile_to_json(profile_from_json(text, "again")) == text
    assert json.loads(profile_to_json(table))["source"] == {"law.batch": "a log", "kv_tokens": "the engine: its start"}
    assert '"batch": [[1, 9.5], [8, 11.0], [64, 14.25]]' in profile_to_json(table)


def test_new_sources_replace_those_of_their_fields_only() -> None:
    profile = parse(source={"law.a_ms": "old", "law.e_ms": "old", "kv_tokens": "kept"})
    assert with_sources(profile, {"law.a_ms": "new", "law.e_ms": "new"}).source == "kv_tokens: kept\nlaw.a_ms: new"


@pytest.mark.parametrize("name", profile_names())
def test_every_shipped_profile_makes_sense(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    step = profile.law
    assert step.c_ms > 0, "longer contexts take longer"
    assert step.step_ms(1, 1_000) < step.step_ms(profile.running_seqs_max, 100_000)
    assert 1_000 < profile.cold_start_ms < 600_000
    assert profile.async_scheduling == (profile.gpu != "CPU")
    figures = {line.partition(": ")[0] for line in profile.source.split("\n")}
    assert {"law.a_ms", "law.c_ms", "law.d_ms", "kv_tokens", "cold_start_ms", "usd_per_gpu_hour"} <= figures
    assert (step.batch == ()) == ("law.batch" not in figures)
    if profile.gpu in HBM_GB:
        assert 0.05 < profile.kv_tokens * profile.kv_bytes_per_token / (HBM_GB[profile.gpu] * 1e9 * profile.gpus) < 0.9
        assert profile.kv_tokens % profile.block_tokens == 0


HBM_GB = {"H100": 85, "H200": 151, "A100": 85, "L40S": 48, "RTX 4090": 25, "RTX PRO 6000": 103}


def test_the_kinds_asked_for_ship_with_8b_and_70b() -> None:
    profiles = [load_profile(name) for name in profile_names()]
    for gpu in ("H100", "H200", "A100", "L40S"):
        assert {"Llama-3.1-8B", "Llama-3.1-70B"} <= {p.model for p in profiles if p.gpu == gpu}
    assert any(p.gpu == "CPU" for p in profiles)


@pytest.mark.parametrize(("better", "worse"), [("h200", "h100"), ("h100", "a100"), ("a100", "l40s")])
def test_decode_is_faster_with_more_bandwidth(better: str, worse: str) -> None:
    fast, slow = (load_profile(f"{gpu}-llama-3.1-8b-bf16").law for gpu in (better, worse))
    assert fast.step_ms(64, 64_000) < slow.step_ms(64, 64_000)


def test_measured_pools_are_met() -> None:
    assert load_profile("h200-llama-3.1-8b-fp8").kv_tokens == 945_029 // 16 * 16
    assert load_profile("rtx4090-llama-3.1-8b-bf16").kv_tokens == 41_408


def test_files_by_name_and_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    mine = replace(load_profile("cpu-smollm2-135m"), name="mine", law=StepLaw(1.0, 0.1, 0.01, 0.02))
    save_profile(mine, path)
    assert load_profile(str(path)) == mine
    with pytest.raises(ProfileError, match="no such profile; did you mean cpu-smollm2-135m"):
        load_profile("cpu-smollm2")
    with pytest.raises(ProfileError, match="cannot be read: No such file"):
        load_profile(str(tmp_path / "none.json"))
    with pytest.raises(ProfileError, match="cannot be read: Is a directory"):
        load_profile(f"{tmp_path}/")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ProfileError, match="is not UTF-8 text"):
        load_profile(str(path))
    path.write_text(" " * 1_000_001)
    with pytest.raises(ProfileError, match="larger than"):
        load_profile(str(path))
