"""The controller actor and the autoscaling policy on real Ray Serve: found, heard, followed, replaced when killed."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.controller_actor import ACTOR_NAME, OWNER_DEPLOYMENT, controller_actor_config
from deployments.scaling import INFLIGHT_METRIC, autoscaling_config
from deployments.serve_internals import find_controller_actor
from deployments.settings import Settings
from policies.types import Histogram, Knobs, ReplicaReport, ReplicaState, StepCoefficients

pytestmark = [pytest.mark.serve, pytest.mark.timeout(180)]

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]
APP = "controller-test"
SETTINGS = Settings.load(
    {"control": {"tick_ms": 200, "plan_ttl_ms": 4_000}, "scaling": {"replicas_max": 2, "up_ticks": 1}}
)
T = TypeVar("T")


class Engine:
    """Stands where the engine stands: reports open requests to Serve, and looks for the controller of its gateway."""

    def __init__(self) -> None:
        self._inflight = 0.0

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {INFLIGHT_METRIC: self._inflight}

    async def set_inflight(self, inflight: float) -> None:
        self._inflight = inflight

    def ask_controller(self, app: str) -> tuple[str, int]:
        """Epoch and first plan's sequence number, over the handle this replica finds."""
        controller = find_controller_actor(app, OWNER_DEPLOYMENT, ACTOR_NAME)
        assert controller is not None
        replica_id = serve.get_replica_context().replica_id.unique_id
        plan = controller.report_replica.remote(_report(replica_id, int(time.monotonic() * 1_000)))
        found = plan.future().result(timeout=10)
        return str(found.epoch), int(found.seq)


class Front:
    """Stands where the gateway stands: the ingress that owns the controller."""

    def __init__(self, engine: DeploymentHandle[Any]) -> None:
        self._engine = engine

    async def ask_controller(self, app: str) -> tuple[str, int]:
        epoch, seq = await self._engine.ask_controller.remote(app)
        return epoch, seq

    async def set_inflight(self, inflight: float) -> None:
        await self._engine.set_inflight.remote(inflight)


def _report(replica_id: str, seq: int) -> ReplicaReport:
    return ReplicaReport(
        replica_id=replica_id,
        model="m",
        seq=seq,
        window_ms=1_000,
        state=ReplicaState.READY,
        running=1,
        waiting=0,
        http_inflight=1,
        kv_tokens_used=10,
        kv_tokens_max=1_000,
        prefill_tokens=10,
        decode_tokens=10,
        prefix_query_tokens=10,
        prefix_hit_tokens=0,
        preemptions=0,
        steps=10,
        busy_share=0.3,
        gpu_utilisation_share=None,
        itl=Histogram(),
        step_model=StepCoefficients(30.0, 1.0, 0.5, 1.8, samples=100),
        knobs=Knobs(16, 512),
        running_seqs_hard=16,
        step_tokens_hard=2_048,
        finished=0,
        aborted=0,
        cold_start_ms=None,
    )


def _until(question: Callable[[], T | None], what: str, seconds: float = 60) -> T:
    """Ask until the answer is not ``None``; a bound for tests that fail, not a claim about speed."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            answer = question()
        except ray.exceptions.RayActorError:
            answer = None
        if answer is not None:
            return answer
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds} s: {what}")


def _ask(method: str, *args: Any) -> Any:
    controller = find_controller_actor(APP, OWNER_DEPLOYMENT, ACTOR_NAME)
    return None if controller is None else ray.get(getattr(controller, method).remote(*args), timeout=10)


def _steering(other_than: str = "") -> dict[str, Any] | None:
    """State of a controller that ticks and hears from Serve's autoscaling policy."""
    state: dict[str, Any] | None = _ask("state")
    steers = state is not None and state["tick"] >= 2 and state["fleet"] is not None
    return state if steers and state is not None and state["epoch"] != other_than else None


def _target(app: str) -> int:
    deployment = serve.status().applications[app].deployments["Engine"]
    return sum(deployment.replica_states.values())


def _engine_app(settings: Settings, *, with_controller: bool) -> serve.Application:
    engine = serve.deployment(
        name="Engine", autoscaling_config=autoscaling_config(settings), ray_actor_options={"num_cpus": 0}
    )(Engine)
    actors = [controller_actor_config(settings)] if with_controller else None
    front = serve.deployment(name=OWNER_DEPLOYMENT, ray_actor_options={"num_cpus": 0}, deployment_actors=actors)(Front)
    return front.bind(engine.bind())


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    before = dict(os.environ)
    os.environ["RAY_SERVE_DEPLOYMENT_ACTOR_HEALTH_CHECK_PERIOD_S"] = "2"
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        namespace="serve",
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
    )
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="module")
def front(cluster: None) -> DeploymentHandle[Any]:
    return serve.run(_engine_app(SETTINGS, with_controller=True), name=APP, route_prefix="/controller-test")


def test_it_is_found_from_another_deployment_and_answers_a_report_with_the_plan(
    front: DeploymentHandle[Any],
) -> None:
    first = _until(_steering, "a steering controller")
    epoch, seq = front.ask_controller.remote(APP).result(timeout_s=20)
    assert epoch == first["epoch"] == _ask("ping")
    assert seq >= first["tick"]


def test_state_knows_the_reporter_and_serve_s_numbers_and_metrics_render(front: DeploymentHandle[Any]) -> None:
    front.ask_controller.remote(APP).result(timeout_s=20)
    state = _until(lambda: (_ask("state") or {}).get("replicas") and _ask("state"), "a known replica")
    assert state["replicas"][0]["age_ms"] >= 0
    assert state["replicas"][0]["knobs"] == {
        "running_seqs_max": 16,
        "step_tokens_max": 512,
        "speculative_depth": None,
    }
    assert {k: v for k, v in state["fleet"].items() if k != "age_ms"} == {
        "replicas_running": 1,
        "replicas_target": 1,
        "replicas_min": 1,
        "replicas_max": 2,
    }
    assert "tidegate_control_ticks_total" in _ask("metrics")
    assert isinstance(_ask("decisions", 10), list)


def test_killed_with_sigkill_a_new_one_with_a_new_epoch_steers(front: DeploymentHandle[Any]) -> None:
    old = _until(_steering, "a steering controller")
    os.kill(old["pid"], signal.SIGKILL)
    killed_s = time.monotonic()
    new = _until(lambda: _steering(other_than=old["epoch"]), "a new controller that steers")
    logger.info("A new controller steers %.1f s after the kill.", time.monotonic() - killed_s)
    assert new["pid"] != old["pid"]
    epoch, _ = front.ask_controller.remote(APP).result(timeout_s=20)
    assert epoch == new["epoch"]


def test_without_a_controller_open_requests_bring_a_second_replica(cluster: None) -> None:
    app = "no-controller"
    handle = serve.run(_engine_app(SETTINGS, with_controller=False), name=app, route_prefix="/no-controller")
    try:
        handle.set_inflight.remote(20.0).result(timeout_s=20)
        _until(lambda: _target(app) == 2 or None, "a second replica by the local rule")
    finally:
        serve.delete(app)
