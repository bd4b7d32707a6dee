"""Composition root: the ``args`` of serve_config.yaml become one Serve application.

``build`` is the import path of the application (``deployments.app:build``). It reads nothing but its argument: settings
are checked first, and the folder of a recording and the file of API keys: a wrong one stops the deployment before any
process starts.
"""

from __future__ import annotations

from typing import Any

from ray.serve import Application

from deployments.auth import check_keys
from deployments.gateway import build_gateway_deployment
from deployments.recording import check_folder
from deployments.settings import Settings
from deployments.settings_models import MAIN_DEPLOYMENT, deployments_of, each_of


def build_engine(settings: Settings, name: str = MAIN_DEPLOYMENT) -> Application:
    """Return the bound deployment ``name`` of the engine that ``model.engine`` names.

    Imports are inside: a machine without vLLM can run the emulated engine, and the other way round.
    """
    if settings.model.engine == "emulated":
        from deployments.emulated_engine import build_emulated_deployment

        return build_emulated_deployment(settings, name)
    from deployments.engine import build_engine_deployment

    return build_engine_deployment(settings, name=name)


def build(args: dict[str, Any]) -> Application:
    """Return the whole application: gateway (ingress), controller actor, engines of each model.

    Raises:
        SettingsError: a key is unknown, misplaced or out of range, the folder of the recording cannot be written, or
            the file of API keys cannot be used; the message has path, value and nearest valid key.
    """
    settings = Settings.load(args)
    for each in each_of(settings):
        check_folder(each)
    check_keys(settings.auth)
    names = deployments_of(settings).values()
    engines = [build_engine(each, name) for each, name in zip(each_of(settings), names, strict=True)]
    return build_gateway_deployment(settings, *engines)
