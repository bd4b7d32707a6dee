"""Everything a replica is besides its engine: its own HTTP port, its signals, its knobs, its health, its leaving.

Used by both engines, so that the emulated one differs from vLLM in nothing but the engine. Knows nothing of Ray: who
reports to whom is passed in as ``report``.

* **Port.** uvicorn in the replica's own event loop serves the engine's native application behind :class:`Gate`.
* **Signals.** Every ``report_interval_ms`` (jittered by 10 %, so that replicas do not report in step) a
  :class:`ReplicaReport` goes to the controller and its answer, the newest plan, comes back. One report is under way at
  a time; a controller that is slow, dead or gone costs nothing but its plans.
* **Devices.** Read before each report, in a thread: one that hangs makes its readings unknown and nothing else late.
* **Knobs.** The plan in force says what the engine may do; without one, or in shadow mode, the engine has its start-up
  values. That is the local safe rule: what the operator configured.
* **Health by progress.** With work and no step finished for ``stuck_after_s`` the replica is unhealthy, and so it is
  when requests came in that long ago, had no byte of answer and the engine knows of no work. Idle is healthy; so is a
  step in progress that is shorter than that. On a slow device one large step may take longer: the limit is then
  :data:`STEP_PATIENCE` times what the step model predicts for a full token budget, at most :data:`STUCK_AFTER_S_MAX`.
* **Sleep.** An engine that can sleeps while the plan says so and nobody is inside; a request wakes it (``sleeper.py``).
* **Leaving.** :meth:`ReplicaHost.drain` serves on for :data:`DRAIN_GRACE_S` while gateways learn of it, then refuses
  new requests and waits for those inside, at most ``drain_s_max``, and not for a stuck engine.

It must not decide values of knobs and must not wait for the controller anywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

import uvicorn

from deployments.clock import now_ns
from deployments.gate import ASGIApp, Gate
from deployments.http_bounds import BoundedHttp
from deployments.knobs import EngineGauges, EngineShared
from deployments.reporting import ReportBuilder
from deployments.settings import ModelSettings
from deployments.sleeper import Sleeper
from policies.config import PolicyConfig
from policies.measures import GpuReading, Roofline
from policies.plan_follower import PlanFollower
from policies.routing.sample import Sample, sample
from policies.speculation import NO_EXPLORATION, exploration
from policies.step_model import predict_step_ms
from policies.types import Knobs, Mode, Plan, ReplicaId, ReplicaReport, ReplicaState

Report = Callable[[ReplicaReport], Awaitable[Plan | None]]
"""Delivers one report to the controller and returns its newest plan; may raise or hang."""

LOOPBACK = "127.0.0.1"
DRAIN_GRACE_S = 2.0
DRAIN_LOOK_S = 1.0
REPORT_TIMEOUT_S = 2.0
GPU_READ_S = 0.5
REPORT_JITTER_SHARE = 0.1
KEEP_ALIVE_S = 120
"""Longer than a gateway keeps an idle connection, so that it is always the gateway that closes it."""
STOP_S = 2
STEP_PATIENCE = 3.0
STUCK_AFTER_S_MAX = 600.0

logger = logging.getLogger("tidegate.replica")


class ReplicaUnhealthyError(RuntimeError):
    """The replica must be replaced; the message says why."""


@dataclass(frozen=True, slots=True)
class ReplicaIdentity:
    """Who this replica is in Serve, and the address its port binds."""

    replica_id: ReplicaId
    app: str
    deployment: str
    host: str = LOOPBACK


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the process belongs to Ray."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ReplicaHost:
    """One per replica; all methods run in the event loop that called :meth:`start`."""

    def __init__(
        self,
        model: ModelSettings,
        policy: PolicyConfig,
        shared: EngineShared,
        identity: ReplicaIdentity,
        started_ns: int,
        report: Report,
        gpu: Callable[[], GpuReading | None] | None = None,
        roofline: Roofline | None = None,
    ) -> None:
        """Bind nothing yet. ``started_ns`` is when the replica began to start; ``gpu`` reads its devices."""
        self._model = model
        self._shared = shared
        self._identity = identity
        self._started_ns = started_ns
        self._report = report
        self._gpu = gpu
        self._gpu_read: asyncio.Future[GpuReading | None] | None = None
        self._builder = ReportBuilder(identity.replica_id, model.name, policy.routing.step_prior, now_ns(), roofline)
        self._follower = PlanFollower()
        self._policy = policy
        self._knobs, self._bounds = Knobs(), NO_EXPLORATION
        self._token = secrets.token_urlsafe(32)
        self._gate: Gate | None = None
        self._server: _Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._loop_task: asyncio.Task[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._port = 0
        self._cold_start_ms: float | None = None
        self._draining = False
        self._stats_seq = 0
        self._sleeper: Sleeper | None = None

    # --- life ---------------------------------------------------------------------------------------------------------

    async def start(self, app: ASGIApp, on_first_body: Callable[[], None] | None = None) -> None:
        """Serve ``app`` on a free port of the identity's host and begin to report. ``OSError``: no port.

        ``on_first_body`` is called when the first byte of an answer leaves.
        """
        self._gate = Gate(app, self._token)
        self._gate.on_first_body = on_first_body
        family = socket.AF_INET6 if ":" in self._identity.host else socket.AF_INET
        sock = socket.socket(family)
        sock.bind((self._identity.host, 0))
        sock.listen(2048)
        self._port = sock.getsockname()[1]
        self._server = _Server(_uvicorn_config(self._gate))
        self._serving = asyncio.create_task(self._server.serve(sockets=[sock]), name="tidegate-replica-server")
        while not self._server.started:
            if self._serving.done():
                raise OSError(f"the replica's HTTP server ended at once: {self._serving.exception()!r}")
            await asyncio.sleep(0.005)
        self._cold_start_ms = (now_ns() - self._started_ns) / 1e6
        self._loop_task = asyncio.create_task(self._report_forever(), name="tidegate-replica-reports")

    def can_sleep(self, sleep: Callable[[], Awaitable[None]], wake: Callable[[], Awaitable[None]]) -> None:
        """The engine can give its device's memory back, and take it again: it sleeps when the plan says so."""
        gate = self._gate
        assert gate is not None, "it has started"
        self._sleeper = Sleeper(sleep, wake, lambda: gate.inflight)
        gate.before = self._sleeper.ready

    async def drain(self) -> None:
        """Leave: serve on for the grace time, refuse new requests, wait for those inside, at most ``drain_s_max``.

        A stuck engine is not waited for: its requests will not end, and its successor needs the device.
        """
        if self._gate is None or self._draining:
            return
        self._draining = True
        end_ns = now_ns() + int(self._model.drain_s_max * 1e9)
        await asyncio.sleep(min(DRAIN_GRACE_S, self._model.drain_s_max))
        self._gate.refuse_new = True
        while self._gate.inflight:
            left_s = (end_ns - now_ns()) / 1e9
            why = "the time is over" if left_s <= 0 else self._stuck()
            if why:
                logger.warning("Leaving with %d open requests: %s.", self._gate.inflight, why)
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._gate.empty.wait(), min(left_s, DRAIN_LOOK_S))

    async def stop(self) -> None:
        """Close the port and stop reporting. Requests still inside are cut after :data:`STOP_S`."""
        for task in (self._loop_task, self._sending):
            if task is not None:
                task.cancel()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait({self._serving}, timeout=STOP_S + 1)
            self._serving.cancel()

    # --- what Serve asks ----------------------------------------------------------------------------------------------

    def metadata(self) -> dict[str, str]:
        """Where gateways reach this replica and the token they show; constant once started."""
        host = self._identity.host
        endpoint = f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"
        return {"endpoint": endpoint, "gate": self._token, "model": self._model.name}

    def routing_stats(self) -> Sample:
        """Fresh sample for the routers. ``seq`` grows with each call, so a receiver can tell new from repeated."""
        self._stats_seq += 1
        return sample(self._stats_seq, self.state(), self._shared.read_gauges(), self._builder.coefficients())

    def autoscaling_stats(self) -> dict[str, float]:
        """Load for the scaling policy's local rule."""
        gauges = self._shared.read_gauges()
        return {
            "http_inflight": float(self._gate.inflight if self._gate else 0),
            "running": float(gauges.running),
            "waiting": float(gauges.waiting),
        }

    async def check_health(self) -> None:
        """Raise :class:`ReplicaUnhealthyError`: no port, an engine without progress, or the plan retires it."""
        if self._serving is None or self._serving.done():
            raise ReplicaUnhealthyError("the replica's HTTP server is not running")
        if why := self._stuck():
            raise ReplicaUnhealthyError(why)
        if self._retired():
            raise ReplicaUnhealthyError("the controller's plan retires this replica: its device became slow")

    def _retired(self) -> bool:
        """Whether the plan in force wants another one in its place."""
        plan = self._follower.current(now_ns())
        return plan is not None and plan.mode is Mode.ACT and self._identity.replica_id in plan.retired

    def state(self) -> ReplicaState:
        """Life of this replica as routers and the controller see it."""
        if self._gate is None:
            return ReplicaState.STARTING
        if self._draining or self._retired():
            return ReplicaState.DRAINING
        return ReplicaState.STUCK if self._stuck() else ReplicaState.READY

    def _stuck(self) -> str | None:
        gauges, now = self._shared.read_gauges(), now_ns()
        limit_ns = int(self._patience_s(gauges) * 1e9)
        if gauges.work_since_ns:
            still_ns = now - max(gauges.progress_ns, gauges.work_since_ns)
            return (
                f"the engine has work and finished no step for {still_ns / 1e9:.0f} s" if still_ns > limit_ns else None
            )
        silent_ns = self._gate.silent_since_ns() if self._gate else None
        if silent_ns is None or now - max(silent_ns, gauges.progress_ns) <= limit_ns:
            return None
        return f"requests have waited for {(now - silent_ns) / 1e9:.0f} s and do not reach the engine"

    def _patience_s(self, gauges: EngineGauges) -> float:
        """How long one step may take."""
        predicted_ms = predict_step_ms(
            self._builder.coefficients(), gauges.running_seqs_now, gauges.kv_tokens_used, gauges.step_tokens_now
        )
        slow_s = min(STEP_PATIENCE * predicted_ms / 1e3, STUCK_AFTER_S_MAX)
        return max(self._model.stuck_after_s, slow_s)

    # --- signals and knobs --------------------------------------------------------------------------------------------

    def apply_plan(self, plan: Plan) -> None:
        """Take a plan from the controller and act on it."""
        self._follower.receive(plan, now_ns())
        self.follow_plan()

    def follow_plan(self) -> None:
        """Write the knobs of the plan in force; without one, or in shadow mode, the engine's start-up values."""
        plan = self._follower.current(now_ns())
        acting = plan is not None and plan.mode is Mode.ACT
        if self._sleeper is not None:
            stands_by = plan is not None and acting and self._identity.replica_id in plan.asleep
            self._sleeper.want(stands_by and not self._draining)
        knobs = plan.knobs.get(self._identity.replica_id, Knobs()) if plan and acting else Knobs()
        bounds = exploration(self._policy, plan, self._identity.replica_id) if plan and acting else NO_EXPLORATION
        if (knobs, bounds) != (self._knobs, self._bounds):
            self._shared.write_knobs(knobs, bounds)
            self._knobs, self._bounds = knobs, bounds

    def build_report(self, gpu: GpuReading | None = None) -> ReplicaReport:
        """Close the current window; ``gpu`` is what its devices said just now."""
        now = now_ns()
        plan = self._follower.current(now)
        return self._builder.build(
            self._shared,
            now,
            state=self.state(),
            http_inflight=self._gate.inflight if self._gate else 0,
            gpu=gpu,
            cold_start_ms=self._cold_start_ms,
            plan_seq=plan.seq if plan else None,
        )

    async def _report_forever(self) -> None:
        rng = random.Random()
        interval_s = self._model.report_interval_ms / 1e3
        while True:
            await asyncio.sleep(interval_s * rng.uniform(1 - REPORT_JITTER_SHARE, 1 + REPORT_JITTER_SHARE))
            try:
                self.follow_plan()
                gpu = await self._read_gpu()
                if self._sending is None or self._sending.done():
                    self._sending = asyncio.create_task(self._send(self.build_report(gpu)))
            except Exception:
                logger.exception("building a report failed")

    async def _read_gpu(self) -> GpuReading | None:
        """One read at a time; ``None`` where it takes longer than :data:`GPU_READ_S`: a device may hang for ever."""
        if self._gpu is None:
            return None
        if self._gpu_read is None or self._gpu_read.done():
            self._gpu_read = asyncio.ensure_future(asyncio.to_thread(self._gpu))
        try:
            return await asyncio.wait_for(asyncio.shield(self._gpu_read), GPU_READ_S)
        except TimeoutError:
            return None

    async def _send(self, report: ReplicaReport) -> None:
        try:
            plan = await asyncio.wait_for(self._report(report), REPORT_TIMEOUT_S)
        except Exception as error:  # noqa: BLE001 - whatever the controller died of, the replica serves on
            logger.debug("the controller did not take report %d: %r", report.seq, error)
            return
        if plan is not None:
            self.apply_plan(plan)


def _uvicorn_config(app: Gate) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        interface="asgi3",
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_S,
    )
