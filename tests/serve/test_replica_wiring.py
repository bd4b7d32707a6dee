"""deployments/replica_wiring.py: options that Ray Serve takes, the private mapping, the start of the process."""

from __future__ import annotations

import json
import stat
import time

import psutil
from ray import serve

from deployments.clock import now_ns
from deployments.replica_wiring import CLOSE_S, deployment_options, new_shared, process_started_ns
from deployments.settings import Settings
from deployments.settings_models import MAIN_DEPLOYMENT
from policies.config import RoutingConfig


class Anything:
    """A deployment needs a class."""


def test_serve_takes_the_options_and_waits_longer_than_a_replica_drains() -> None:
    settings = Settings.load({"model": {"engine": "emulated", "drain_s_max": 77.0}, "scaling": {"replicas_max": 3}})
    options = deployment_options(settings)
    deployment = serve.deployment(Anything, **options)
    assert deployment.name == MAIN_DEPLOYMENT
    config = deployment._deployment_config
    assert config.graceful_shutdown_timeout_s == 77.0 + CLOSE_S
    assert config.autoscaling_config is not None
    assert config.autoscaling_config.max_replicas == 3
    assert config.max_ongoing_requests >= 10_000


def test_the_routers_arguments_are_plain_values_that_make_a_routing_config() -> None:
    options = deployment_options(Settings.load({"model": {"engine": "emulated"}, "routing": {"load_bound": 2.0}}))
    arguments = options["request_router_config"]["request_router_kwargs"]
    assert json.loads(json.dumps(arguments)) == arguments
    assert RoutingConfig(**arguments["routing"]).load_bound == 2.0


def test_each_replica_gets_a_private_mapping_of_its_own() -> None:
    first, second = new_shared(), new_shared()
    try:
        assert first.path != second.path
        assert stat.S_IMODE(first.path.stat().st_mode) == 0o600
    finally:
        first.close()
        second.close()
    assert not first.path.exists()


def test_a_cold_start_is_counted_from_the_start_of_the_process() -> None:
    age_s = (now_ns() - process_started_ns()) / 1e9
    assert abs(age_s - (time.time() - psutil.Process().create_time())) < 2
