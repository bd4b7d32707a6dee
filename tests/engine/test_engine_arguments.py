"""deployments/engine.py: what vLLM is told, and which contradictions stop the start. Skipped where vLLM is absent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from fastapi import FastAPI
from fastapi.testclient import TestClient

from deployments.engine import SCHEDULER, cpu_dtype, engine_arguments, llm_config, speak_openai
from deployments.settings import ModelSettings, Settings, SettingsError
from deployments.worker_extension import DeviceName


def arguments(**model: Any) -> dict[str, Any]:
    return engine_arguments(ModelSettings(**model))


def test_cpu_defaults_can_be_overridden_but_not_the_scheduler() -> None:
    built = arguments()
    assert built["dtype"] in {"bfloat16", "float32"}
    assert built["enforce_eager"] is True
    assert built["enable_prompt_tokens_details"] is True
    assert built["scheduler_cls"] == SCHEDULER
    assert arguments(engine_args={"dtype": "float16"})["dtype"] == "float16"


@pytest.mark.parametrize(
    ("cpu_info", "dtype"),
    [
        ("flags\t\t: fpu avx2 fma f16c", "float32"),
        ("flags\t\t: fpu avx2 avx512f", "float32"),
        ("flags\t\t: fpu avx512f avx512_bf16", "bfloat16"),
        ("flags\t\t: fpu avx512f amx_tile amx_bf16", "bfloat16"),
        ("Features\t: fp asimd bf16", "bfloat16"),
        ("Features\t: fp asimd", "float32"),
        ("model name: bf16 in a name", "float32"),
        ("", "float32"),
    ],
)
def test_bfloat16_only_where_the_processor_has_it(cpu_info: str, dtype: str) -> None:
    assert cpu_dtype(cpu_info) == dtype


def test_speculation_runs_with_the_scheduler_that_can_cut_drafts() -> None:
    speculative = {"method": "ngram", "num_speculative_tokens": 4}
    assert arguments(engine_args={"speculative_config": speculative})["async_scheduling"] is False
    assert "async_scheduling" not in arguments()
    kept = arguments(engine_args={"speculative_config": speculative, "async_scheduling": True})
    assert kept["async_scheduling"] is True


def test_gpus_become_tensor_parallelism() -> None:
    assert arguments(device="gpu", num_gpus=1.0)["tensor_parallel_size"] == 1
    assert arguments(device="gpu", num_gpus=4.0)["tensor_parallel_size"] == 4
    assert arguments(device="gpu", num_gpus=0.5)["tensor_parallel_size"] == 1
    split = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert arguments(device="gpu", num_gpus=4.0, engine_args=split)["pipeline_parallel_size"] == 2


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ({"engine_args": {"data_parallel_size": 2}}, "data_parallel_size"),
        ({"context_tokens_max": 1024, "engine_args": {"max_model_len": 2048}}, "max_model_len"),
        ({"device": "gpu", "num_gpus": 2.0, "engine_args": {"tensor_parallel_size": 4}}, "num_gpus"),
    ],
)
def test_contradictions_stop_the_start(model: dict[str, Any], path: str) -> None:
    with pytest.raises(SettingsError, match=path):
        arguments(**model)


def test_a_replica_reserves_what_the_settings_say_and_no_more() -> None:
    config = llm_config(Settings.load({"model": {"num_cpus": 1.5}}))
    assert config.placement_group_config == {"bundles": [{"CPU": 1.5}]}
    assert config.deployment_config["ray_actor_options"]["num_cpus"] == 0
    assert llm_config(Settings.load({"model": {"num_cpus": 0}})).placement_group_config["bundles"][0]["CPU"] > 0
    half = llm_config(Settings.load({"model": {"device": "gpu", "num_gpus": 0.5}}))
    assert half.placement_group_config == {"bundle_per_worker": {"GPU": 0.5}}


def test_the_mapping_and_the_users_additional_config_travel_together(tmp_path: Path) -> None:
    extra = {"additional_config": {"mine": 1}}
    settings = Settings.load({"model": {"source": str(tmp_path), "engine_args": extra}})
    built = llm_config(settings, tmp_path / "shared").engine_kwargs
    own = {"shared": str(tmp_path / "shared"), "replica_pid": os.getpid()}
    assert built["additional_config"] == {"mine": 1, "tidegate": own}
    assert built["scheduler_cls"] == SCHEDULER


def test_errors_of_the_framework_have_openais_shape() -> None:
    app = FastAPI()

    @app.get("/known")
    def known() -> None:
        """Only to have one route."""

    speak_openai(app)
    client = TestClient(app)
    for response, code in ((client.get("/unknown"), "not_found"), (client.post("/known"), "method_not_allowed")):
        assert set(response.json()) == {"error"}
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        assert response.json()["error"]["code"] == code
    assert client.post("/known").headers["allow"] == "GET"


def test_a_worker_without_cuda_names_no_device() -> None:
    assert DeviceName().tidegate_device() is None
