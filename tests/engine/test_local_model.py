"""Ray's download step is switched off for a model that is a folder, and only then."""

from __future__ import annotations

import asyncio
from pathlib import Path

from ray.llm._internal.common.callbacks.base import CallbackCtx

from deployments.engine import llm_config
from deployments.local_model import CALLBACK, LocalModel
from deployments.settings import Settings


def config_of(source: str, shared: Path) -> object:
    settings = Settings.load({"model": {"source": source}})
    return llm_config(settings, shared).callback_config.callback_class


def test_a_folder_is_not_downloaded(tmp_path: Path) -> None:
    assert config_of(str(tmp_path), tmp_path / "shared") == CALLBACK


def test_a_hub_id_is(tmp_path: Path) -> None:
    assert config_of("somebody/some-model", tmp_path / "shared") != CALLBACK


def test_ray_still_asks_before_it_downloads() -> None:
    hook = LocalModel.__new__(LocalModel)
    hook.ctx = CallbackCtx()
    assert hook.ctx.run_init_node is True
    asyncio.run(hook.on_before_node_init())
    assert hook.ctx.run_init_node is False
