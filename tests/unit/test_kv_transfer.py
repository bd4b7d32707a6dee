"""What the engines of a fleet with roles are started with, and which settings go together."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from deployments.kv_transfer import PORT_VARIABLE, open_side_channel, transfer_arguments
from deployments.settings import Settings, SettingsError

BOTH_WAYS = "bidirectional_kv_xfer"
ON = {"disaggregation": {"enabled": True, "lease_s": 20}}


def load(**sections: Any) -> Settings:
    return Settings.load({"auth": "none", **sections})


def test_every_engine_may_produce_and_consume_and_computes_what_it_cannot_pull() -> None:
    assert transfer_arguments(load()) == {}
    assert transfer_arguments(load(**ON)) == {
        "kv_transfer_config": {
            "kv_connector": "NixlConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_buffer_device": "cpu",
            "kv_connector_extra_config": {"kv_lease_duration": 20},
        }
    }


def test_more_of_the_connector_may_be_set() -> None:
    own = {"kv_transfer_config": {"kv_connector_extra_config": {"backends": ["LIBFABRIC"]}}}
    given = transfer_arguments(load(model={"engine_args": own}, **ON))["kv_transfer_config"]
    assert given["kv_connector_extra_config"] == {"kv_lease_duration": 20, "backends": ["LIBFABRIC"]}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"engine": "emulated"}}, "needs model.engine 'vllm'"),
        ({"scaling": {"replicas_max": 1}}, "needs scaling.replicas_max of at least 2"),
        ({"disaggregation": {"enabled": True, "prefill_replicas": 2}}, "somebody must decode"),
        (
            {"model": {"engine_args": {"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1"}}}},
            "kv_transfer_config.kv_connector: 'LMCacheConnectorV1': must be 'NixlConnector'",
        ),
        (
            {"model": {"engine_args": {"kv_transfer_config": {"kv_role": "kv_producer"}}}},
            "kv_transfer_config.kv_role: 'kv_producer': must be 'kv_both'",
        ),
        (
            {"model": {"engine_args": {"kv_transfer_config": {"kv_connector_extra_config": None}}}},
            "kv_connector_extra_config: None: must be a section",
        ),
        (
            {"model": {"engine_args": {"kv_transfer_config": {"kv_connector_extra_config": {BOTH_WAYS: True}}}}},
            f"kv_connector_extra_config.{BOTH_WAYS}: each answer would keep its blocks",
        ),
        ({"model": {"stuck_after_s": 15.0}}, "pull_timeout_ms: 15000: must be below model.stuck_after_s (15 s)"),
        ({"disaggregation": {"prefill_replicas": 3}}, "has no effect because disaggregation.enabled is false"),
        ({"disaggregation": {"enabled": True, "lease_s": 1}}, "must be at least 6"),
    ],
)
def test_what_does_not_go_together_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        load(**(ON | sections))


def test_each_replica_has_a_side_channel_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PORT_VARIABLE, raising=False)
    open_side_channel(load())
    assert PORT_VARIABLE not in os.environ
    open_side_channel(load(**ON))
    first = os.environ[PORT_VARIABLE]
    assert 1_024 < int(first) < 65_536
