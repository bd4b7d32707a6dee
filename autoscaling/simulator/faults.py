"""Makes the faults of a scenario happen, at their times, to the replicas that are ready then.

What this must not do: repair anything; Serve, gateways and the controller do what they do live.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autoscaling.simulator.context import Context
from autoscaling.simulator.control import Controller
from autoscaling.simulator.replica import GONE, Phase, Replica
from autoscaling.simulator.serve import PoolServe
from autoscaling.simulator.spec import Fault

KINDS = (
    "kill", "slow", "freeze", "mute", "refuse", "unavailable", "errors", "controller", "gateway_blind", "start_fail",
    "flush",
)  # fmt: skip


class FaultError(ValueError):
    """A fault that cannot be."""


class Faults:
    """Plans every fault on construction. ``blind`` is told until when gateways get no samples."""

    def __init__(
        self,
        ctx: Context,
        pools: Sequence[PoolServe],
        controllers: Sequence[Controller],
        blind: Callable[[int], None],
    ) -> None:
        self._ctx = ctx
        self._pools = pools
        self._controllers = controllers
        self._blind = blind
        for i, fault in enumerate(ctx.scenario.faults):
            if fault.kind not in KINDS:
                raise FaultError(f"faults[{i}].kind: {fault.kind!r}: must be one of {', '.join(KINDS)}")
            if fault.at_ns < 0 or fault.duration_ns < 0 or fault.replica < 0 or not fault.factor > 0:
                raise FaultError(
                    f"faults[{i}]: times and the replica must not be negative, the factor above 0: {fault}"
                )
            ctx.queue.at(fault.at_ns, self._on_fault, fault)

    def _on_fault(self, now_ns: int, fault: Fault) -> None:
        until_ns = now_ns + fault.duration_ns
        if fault.kind == "controller":
            for controller in self._controllers:
                controller.kill()
            self._ctx.queue.at(until_ns, self._on_controller_back)
        elif fault.kind == "gateway_blind":
            self._blind(until_ns)
        elif fault.kind == "start_fail":
            for pool in self._pools:
                pool.starts_fail_until_ns = max(pool.starts_fail_until_ns, until_ns)
        else:
            self._on_replica(fault, until_ns, now_ns)

    def _on_replica(self, fault: Fault, until_ns: int, now_ns: int) -> None:
        ready = [(pool, r) for pool in self._pools for r in pool.of_phase(Phase.READY)]
        if not ready:
            return
        pool, replica = ready[fault.replica % len(ready)]
        if fault.kind == "kill":
            pool.kill(replica, now_ns)
        elif fault.kind == "mute":
            replica.muted_until_ns = max(replica.muted_until_ns, until_ns)
        elif fault.kind == "refuse":
            replica.refuses_until_ns = max(replica.refuses_until_ns, until_ns)
        elif fault.kind == "unavailable":
            replica.unavailable_until_ns = max(replica.unavailable_until_ns, until_ns)
        elif fault.kind == "flush":
            replica.flush_cache(now_ns)
        elif fault.kind == "errors":
            replica.errors_until_ns = max(replica.errors_until_ns, until_ns)
        else:
            frozen = fault.kind == "freeze"
            replica.set_speed(math.inf if frozen else fault.factor, now_ns)
            replica.speed_version += 1
            self._ctx.queue.at(until_ns, self._on_speed_back, (replica, replica.speed_version))
            if frozen:
                pool.watch(replica, now_ns)
                self._ctx.queue.at(now_ns + self._ctx.delays.idle_max, replica.look_if_silent, replica.speed_version)

    def _on_speed_back(self, now_ns: int, change: tuple[Replica, int]) -> None:
        replica, version = change
        if replica.phase not in GONE and replica.speed_version == version:
            replica.set_speed(1.0, now_ns)

    def _on_controller_back(self, now_ns: int, _: object) -> None:
        for controller in self._controllers:
            if not controller.alive:
                controller.begin(now_ns)
