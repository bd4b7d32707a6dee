"""The controller actor and the autoscaling policy on real Ray Serve: found, heard, followed, replaced when killed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.control_desk import DecisionFilter
from deployments.controller_actor import ACTOR_NAME, OWNER_DEPLOYMENT, controller_actor_config
from deployments.scaling import INFLIGHT_METRIC, LOOK_BACK_S, METRICS_INTERVAL_S, autoscaling_config
from deployments.serve_internals import find_controller_actor
from deployments.settings import Settings
from policies.types import GatewayReport, Histogram, Knobs, ReplicaReport, ReplicaState, StepCoefficients

pytestmark = [pytest.mark.serve, pytest.mark.timeout(180)]

logger = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]
APP = "controller-test"
SETTINGS = Settings.load(
    {
        "model": {"name": "m"},
        "control": {"tick_ms": 200, "plan_ttl_ms": 4_000},
        "scaling": {"replicas_max": 2, "up_ticks": 1, "down_window_s": 1.0},
    }
)
IDLE, BUSY = "0 0", "60 44"
T = TypeVar("T")


class Engine:
    """Stands where the engine stands: reports to the controller of its gateway, and its open requests to Serve.

    How loaded it says it is stands in a file that the test writes: ``open requests``, ``waiting``.
    """

    def __init__(self, app: str, load: str) -> None:
        self._app, self._load = app, Path(load)
        self._seq = 0
        self._task = asyncio.get_running_loop().create_task(_every_half_second(self.report))

    def _loaded(self) -> tuple[int, int]:
        inflight, waiting = self._load.read_text(encoding="utf-8").split()
        return int(inflight), int(waiting)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return {INFLIGHT_METRIC: float(self._loaded()[0])}

    async def report(self) -> tuple[str, int] | None:
        """Epoch and sequence number of the plan that a report is answered with."""
        controller = await asyncio.to_thread(find_controller_actor, self._app, OWNER_DEPLOYMENT, ACTOR_NAME)
        if controller is None:
            return None
        self._seq += 1
        replica_id = serve.get_replica_context().replica_id.unique_id
        plan = await controller.report_replica.remote(_report(replica_id, self._seq, *self._loaded()))
        return None if plan is None else (str(plan.epoch), int(plan.seq))


class Front:
    """Stands where the gateway stands: the ingress that owns the controller."""

    def __init__(self, engine: DeploymentHandle[Any], app: str) -> None:
        self._engine, self._app = engine, app
        self._seq = 0
        self._task = asyncio.get_running_loop().create_task(_every_half_second(self._report))

    async def _report(self) -> None:
        controller = await asyncio.to_thread(find_controller_actor, self._app, OWNER_DEPLOYMENT, ACTOR_NAME)
        if controller is not None:
            self._seq += 1
            await controller.report_gateway.remote(_gateway_report(self._seq))

    async def report(self) -> tuple[str, int] | None:
        return cast(tuple[str, int] | None, await self._engine.report.remote())


async def _every_half_second(action: Callable[[], Awaitable[Any]]) -> None:
    while True:
        await asyncio.sleep(0.5)
        with contextlib.suppress(ray.exceptions.RayError):
            await action()


def _report(replica_id: str, seq: int, inflight: int, waiting: int) -> ReplicaReport:
    return ReplicaReport(
        replica_id=replica_id,
        model="m",
        seq=seq,
        window_ms=500,
        state=ReplicaState.READY,
        running=inflight - waiting,
        waiting=waiting,
        http_inflight=inflight,
        kv_tokens_used=10,
        kv_tokens_max=1_000,
        prefill_tokens=10,
        decode_tokens=10,
        prefix_query_tokens=10,
        prefix_hit_tokens=0,
        preemptions=0,
        steps=10,
        busy_share=1.0 if inflight else 0.0,
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


def _gateway_report(seq: int) -> GatewayReport:
    return GatewayReport(
        gateway_id="front",
        model="m",
        seq=seq,
        window_ms=500,
        ttft=Histogram(),
        itl=Histogram(),
        e2e=Histogram(),
        arrivals=0,
        succeeded=0,
        failed={},
        prompt_tokens=0,
        output_tokens=0,
        inflight=0,
        queued=0,
        routed={},
        predicted_prompt_tokens={},
        predicted_hit_tokens={},
        ttft_error_ms=Histogram(),
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


def _running(app: str, replicas: int) -> bool | None:
    """Whether Serve runs exactly so many engine replicas, and no others that start or stop."""
    return serve.status().applications[app].deployments["Engine"].replica_states == {"RUNNING": replicas} or None


def _run(app: str, load: Path, *, with_controller: bool) -> DeploymentHandle[Any]:
    engine = serve.deployment(
        name="Engine",
        autoscaling_config=autoscaling_config(SETTINGS),
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=1,
    )(Engine)
    actors = [controller_actor_config(SETTINGS)] if with_controller else None
    front = serve.deployment(name=OWNER_DEPLOYMENT, ray_actor_options={"num_cpus": 0}, deployment_actors=actors)(Front)
    load.write_text(IDLE, encoding="utf-8")
    bound = front.bind(engine.bind(app, str(load)), app)
    return serve.run(bound, name=app, route_prefix=f"/{app}")


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
def load(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("load") / "load"


@pytest.fixture(scope="module")
def front(cluster: None, load: Path) -> DeploymentHandle[Any]:
    return _run(APP, load, with_controller=True)


def test_it_is_found_from_another_deployment_and_answers_a_report_with_the_plan(front: DeploymentHandle[Any]) -> None:
    first = _until(_steering, "a steering controller")
    epoch, seq = _until(lambda: front.report.remote().result(timeout_s=20), "a plan")
    assert epoch == first["epoch"] == _ask("ping")
    assert seq >= first["tick"]


def test_state_knows_the_reporters_and_serve_s_numbers(front: DeploymentHandle[Any]) -> None:
    state = _until(lambda: s if (s := _ask("state")) and s["replicas"] and s["gateways"] else None, "known reporters")
    (replica,) = state["replicas"]
    assert replica["knobs"] == {"running_seqs_max": 16, "step_tokens_max": 512, "speculative_depth": None}
    assert [g["gateway_id"] for g in state["gateways"]] == ["front"]
    numbers = {"replicas_running": 1, "replicas_target": 1, "replicas_min": 1, "replicas_max": 2, "unschedulable": 0}
    fleet = {**numbers, "capped": False}
    assert {key: value for key, value in state["fleet"].items() if key != "age_ms"} == fleet
    assert 'tidegate_control_ticks_total{result="ok"}' in _ask("metrics")


def test_a_queue_brings_the_second_replica_and_its_end_takes_it_away(front: DeploymentHandle[Any], load: Path) -> None:
    _until(lambda: _running(APP, 1), "one replica")
    load.write_text(BUSY, encoding="utf-8")
    _until(lambda: _running(APP, 2), "a second replica")
    load.write_text(IDLE, encoding="utf-8")
    _until(lambda: _running(APP, 1), "one replica again")
    moves = [
        (d["before"]["replicas_target"], d["after"]["replicas_target"])
        for d in _ask("decisions", 100, None, DecisionFilter())
        if d["lever"] == "replicas"
    ]
    assert (1, 2) in moves
    assert (2, 1) in moves


def test_killed_with_sigkill_a_new_one_with_a_new_epoch_steers(front: DeploymentHandle[Any]) -> None:
    old = _until(_steering, "a steering controller")
    os.kill(old["pid"], signal.SIGKILL)
    killed_s = time.monotonic()
    new = _until(lambda: _steering(other_than=old["epoch"]), "a new controller that steers")
    logger.info("A new controller steers %.1f s after the kill.", time.monotonic() - killed_s)
    assert new["pid"] != old["pid"]
    epoch, _ = _until(lambda: front.report.remote().result(timeout_s=20), "a plan of the new controller")
    assert epoch == new["epoch"]


def test_without_a_controller_open_requests_bring_a_second_replica_and_none_is_taken(
    cluster: None, tmp_path: Path
) -> None:
    app, load = "no-controller", tmp_path / "load"
    _run(app, load, with_controller=False)
    try:
        load.write_text(BUSY, encoding="utf-8")
        _until(lambda: _running(app, 2), "a second replica by the local rule")
        load.write_text(IDLE, encoding="utf-8")
        time.sleep(METRICS_INTERVAL_S + LOOK_BACK_S + 2)  # long enough for the policy to see it
        assert _running(app, 2)
    finally:
        serve.delete(app)
