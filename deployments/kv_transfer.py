"""What an engine needs to hand its KV cache over: vLLM's NIXL connector, and a side channel of its own.

Every replica is producer and consumer (``kv_both``), so that roles can change while it runs. Ray makes the engine's id
and the side channel's host (``NixlConnectorBackend``); the port is chosen here, because Ray's (a base plus the
replica's rank) meets those of other applications, and of other models, on the same host.

``kv_load_failure_policy`` is ``recompute``: an engine that cannot pull (its peer is dead, unknown, or the transfer
breaks) computes the prompt itself. A peer that does not answer the side channel is given up by vLLM after 5 s.

It must not decide who prefills.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from deployments.settings import Settings
from deployments.settings_engine import CONNECTOR

PORT_VARIABLE = "VLLM_NIXL_SIDE_CHANNEL_PORT"


def transfer_arguments(settings: Settings) -> dict[str, Any]:
    """Arguments for vLLM beside those of ``engine_arguments``; nothing where replicas have no roles."""
    split = settings.disaggregation
    if not split.enabled:
        return {}
    given = dict(settings.model.engine_args.get("kv_transfer_config") or {})
    extra = {"kv_lease_duration": split.lease_s, **given.pop("kv_connector_extra_config", {})}
    ours: dict[str, Any] = {**CONNECTOR, "kv_load_failure_policy": "recompute"}
    if settings.model.device == "cpu":
        ours["kv_buffer_device"] = "cpu"
    return {"kv_transfer_config": {**ours, **given, "kv_connector_extra_config": extra}}


def open_side_channel(settings: Settings) -> None:
    """Name a free port for this replica's engine core, which inherits the environment. Once, before the engine starts.

    The port is free now; somebody else may take it until the engine core listens. Then the start fails, and Serve
    starts another replica.
    """
    if not settings.disaggregation.enabled:
        return
    with socket.socket() as listener:
        listener.bind(("", 0))
        os.environ[PORT_VARIABLE] = str(listener.getsockname()[1])
