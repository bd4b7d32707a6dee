"""The real engine deployment, with methods that let a test look into the replica and hand it a plan."""

from __future__ import annotations

from typing import Any

from deployments.engine import VllmEngine
from deployments.knobs import EngineGauges, StepRecord
from policies.types import Knobs, Mode, Plan, ReplicaReport


class ProbedEngine(VllmEngine):
    """Nothing is replaced: the methods below read what the replica has and use what the controller uses."""

    plans = 0

    async def set_knobs(self, knobs: Knobs) -> None:
        """Act on a plan with these knobs for the rest of the test."""
        assert self._host is not None
        self.plans += 1
        replica_id = self._host._identity.replica_id
        self._host.apply_plan(Plan("test", self.plans, 3_600_000, Mode.ACT, knobs={replica_id: knobs}))

    async def gauges(self) -> EngineGauges:
        return self._shared.read_gauges()

    async def steps(self, after_seq: int) -> list[StepRecord]:
        steps, _, lost = self._shared.read_steps(after_seq)
        assert lost == 0
        return steps

    async def report(self) -> ReplicaReport:
        assert self._host is not None
        return self._host.build_report()

    async def drain(self) -> None:
        assert self._host is not None
        await self._host.drain()

    async def engine_pids(self) -> list[int]:
        """Process ids of the engine core."""
        client: Any = self.engine
        return [p.pid for p in client._engine_client.engine_core.resources.engine_manager.processes]
