"""The controller: receives reports, runs one pure tick per period, hands out the plan, and says why.

It decides nothing: ``policies.control.loop.tick`` does. Every report is answered with the current plan, so reporting
*is* following, and a lost answer only makes a plan older. A new controller has a new epoch and knows nothing: it
answers ``None`` until its first tick, and its plans leave the number of replicas open until signals arrive.

A tick that raises is logged, counted and does not end the loop; after :data:`FAILED_TICKS_MAX` in a row the process
ends, so that Serve replaces it. Ticks keep to a fixed grid of the monotonic clock and never overlap: late ones are
skipped.

Not thread-safe: everything runs on one event loop, in the actor of ``deployments/controller_actor.py``.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from autoscaling.recommend import ReplicaScaler
from autoscaling.share import Claim
from autoscaling.simulator.recorded import (
    FleetLine,
    GatewayLine,
    Line,
    ReplicaLine,
    StartLine,
    failed_tick_line,
    tick_line,
)
from autoscaling.warm import WarmPool
from dashboards.catalogue import Source
from deployments import control_overview, control_view
from deployments.clock import now_ns, wall_ns
from deployments.control_desk import ControlDesk
from deployments.recording import open_ledger, open_recorder
from deployments.replica_metrics import show_signals
from deployments.settings import Settings
from deployments.settings_models import claim_of
from deployments.telemetry import Telemetry
from deployments.tenant_desk import TenantAnswer, TenantDesk, TenantReport
from policies.build import build_control
from policies.config import PolicyConfig
from policies.control.loop import TickResult, tick
from policies.control.objective import ObjectiveSample, total
from policies.measures import StartReport
from policies.tasks import TaskLedger, TaskShares, TaskUse
from policies.types import FleetView, GatewayReport, Plan, ReplicaReport, Sampled

logger = logging.getLogger(__name__)

FAILED_TICKS_MAX = 10
"""Failed ticks in a row after which the process gives up."""

GATEWAYS_MAX = 256
"""Gateways whose last report is kept for :meth:`Controller.state`."""


TICKS_KEPT = 8
"""Last ticks whose state can still be asked for: beside a decision stands what was known when it was made."""


class Controller:
    """See the module. ``on_broken`` is called once when ticks keep failing and must end the process.

    Args:
        args: the application's settings as plain values (``Settings.to_args``).
        on_broken: ends the process.
        ledger_folder: where the ledger's files go if ``ledger.folder`` names none; ``None``: nowhere.
    """

    def __init__(
        self, args: Mapping[str, Any], on_broken: Callable[[], None], ledger_folder: str | None = None
    ) -> None:
        self.epoch = uuid.uuid4().hex
        """Identifies this life."""
        settings = Settings.load(args)
        config = settings.policy_config()
        self._settings = settings
        self._model = settings.model.name
        self._control = build_control(config, ReplicaScaler(config), self.epoch, pool=WarmPool(config))
        self._recorder = open_recorder(settings, "controller", self.epoch)
        self._ledger_file = open_ledger(settings, self.epoch, ledger_folder)
        self.desk = ControlDesk(self._control, settings, self._record)
        """What people ask and tell."""
        self._on_broken = on_broken
        self._telemetry = Telemetry(Source.CONTROLLER)
        self._tenants = TenantDesk(config, self.epoch, wall_ns())
        self._shares = TaskLedger(config.tasks, self.epoch, now_ns())
        self._gateways: OrderedDict[str, Sampled[GatewayReport]] = OrderedDict()
        self._fleet: Sampled[FleetView] | None = None
        self._last: TickResult | None = None
        self._objective: deque[ObjectiveSample] = deque()
        self._shown: tuple[TickResult | None, dict[str, Any]] | None = None
        self._kept: deque[TickResult] = deque(maxlen=TICKS_KEPT)
        self._task: asyncio.Task[None] | None = None
        self._started_ns = now_ns()
        self._failed_in_a_row = 0

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start ticking on the running event loop."""
        logger.info("Controller %s starts in mode %s.", self.epoch[:8], self._config.control.mode)
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def close(self) -> None:
        """Stop ticking."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        for recorder in (self._recorder, self._ledger_file):
            if recorder is not None:
                await asyncio.to_thread(recorder.close)

    @property
    def _config(self) -> PolicyConfig:
        """The configuration in force: objectives may have changed since the start."""
        return self._control.config

    async def _run(self) -> None:
        period_ns = int(self._config.control.tick_ms * 1e6)
        due_ns = now_ns() + period_ns
        while True:
            await asyncio.sleep(max(0, due_ns - now_ns()) / 1e9)
            self.tick()
            due_ns = next_due_ns(due_ns, now_ns(), period_ns)

    def tick(self) -> None:
        """One tick now. Never raises."""
        started_ns = now_ns()
        try:
            result = self._decide(started_ns)
            self._took(result, started_ns)
        except Exception:
            self._telemetry["tidegate_control_ticks_total"].inc(result="failed")
            self._failed_in_a_row += 1
            logger.exception("Tick failed (%d in a row).", self._failed_in_a_row)
            if self._failed_in_a_row == FAILED_TICKS_MAX:
                logger.critical("%d ticks failed in a row: this controller gives up.", self._failed_in_a_row)
                self._on_broken()
            return
        self._failed_in_a_row = 0
        self._telemetry["tidegate_control_ticks_total"].inc(result="ok")
        self._telemetry["tidegate_control_tick_seconds"].observe((now_ns() - started_ns) / 1e9)

    def _decide(self, at_ns: int) -> TickResult:
        try:
            result = tick(self._control, at_ns)
        except Exception as error:
            self._record(failed_tick_line(error, self._control.ticks, at_ns))
            raise
        self._record(tick_line(result, at_ns))
        return result

    def _record(self, line: Line) -> None:
        if self._recorder is not None:
            self._recorder.put(line)

    def _took(self, result: TickResult, at_ns: int) -> None:
        self._last = result
        self._remember(result.objective)
        self._kept.append(result)
        for decision in result.decisions:
            logger.info(control_view.in_words(decision))
        for line in self.desk.took(result):
            if self._ledger_file is not None:
                self._ledger_file.put(line)
        self._forget_gateways(at_ns)
        control_view.update_telemetry(self._telemetry, result)
        self._tenants.update_telemetry(self._telemetry, wall_ns())
        control_view.show_objectives(self._telemetry, self._config, self._model)
        control_view.show_guard(self._telemetry, self._control.guard.status(at_ns))
        for metric, recorder in (
            (self._telemetry["tidegate_control_recording_lines_total"], self._recorder),
            (self._telemetry["tidegate_control_ledger_lines_total"], self._ledger_file),
        ):
            for word, lines in zip(("ok", "dropped"), recorder.take_counts() if recorder else (0, 0), strict=True):
                metric.inc(lines, result=word)

    def _remember(self, sample: ObjectiveSample) -> None:
        """Keep what the objective did in the last :data:`control_overview.OBJECTIVE_S`."""
        self._objective.append(sample)
        while len(self._objective) > 1 and sum(s.seconds for s in self._objective) > control_overview.OBJECTIVE_S:
            self._objective.popleft()

    def _forget_gateways(self, at_ns: int) -> None:
        forget_after_ms = self._config.control.forget_after_ms
        for gateway_id in [g for g, s in self._gateways.items() if s.age_ms(at_ns) > forget_after_ms]:
            del self._gateways[gateway_id]

    # --- reports ----------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The last tick's plan; ``None`` before the first."""
        return self._last.plan if self._last is not None else None

    def report_replica(self, report: ReplicaReport) -> Plan | None:
        """Take a replica's report; the current plan is the answer."""
        received_ns = now_ns()
        self._record(ReplicaLine(received_ns, report))
        if self._control.receive_replica(report, received_ns):
            control_view.count_report(self._telemetry, report)
        return self.plan

    def report_gateway(self, report: GatewayReport) -> Plan | None:
        """Take a gateway's report; the current plan is the answer."""
        received_ns = now_ns()
        self._record(GatewayLine(received_ns, report))
        self._control.receive_gateway(report, received_ns)
        self._gateways[report.gateway_id] = Sampled(report, received_ns)
        self._gateways.move_to_end(report.gateway_id)
        if len(self._gateways) > GATEWAYS_MAX:
            self._gateways.popitem(last=False)
        return self.plan

    def report_start(self, report: StartReport) -> None:
        """Take what a replica says of its start."""
        received_ns = now_ns()
        self._record(StartLine(received_ns, report))
        start = self._control.receive_start(report, received_ns)
        for phase, ms in start.phases_ms.items() if start is not None else ():
            self._telemetry["tidegate_replica_start_seconds"].observe(ms / 1_000, phase=phase.value)

    def exchange_tasks(self, gateway_id: str, epoch: str, seq: int, uses: list[TaskUse]) -> TaskShares:
        """Take what a gateway counted of tasks; what the others did since its last exchange is the answer."""
        return self._shares.exchange(gateway_id, epoch, seq, uses, now_ns())

    def report_tenants(self, report: TenantReport) -> TenantAnswer:
        """Take what a gateway says of its tenants; leases of their budgets are the answer."""
        return self._tenants.take(report, wall_ns())

    def fleet(self, view: Mapping[str, Any]) -> dict[str, Any] | None:
        """Take Serve's numbers (the fields of :class:`FleetView`); the answer is the plan as plain values.

        Plain both ways: the caller runs in Serve's controller process, which does not have this project's types.
        """
        received_ns = now_ns()
        fleet = FleetView(**view)
        self._record(FleetLine(received_ns, fleet))
        self._fleet = Sampled(fleet, received_ns)
        self._control.receive_fleet(fleet, received_ns)
        return control_view.wire_plan(self.plan) if self.plan is not None else None

    def claim(self) -> Claim:
        """Its part in the sharing of what all models together may hold."""
        advice = self._last.adaptation.advice if self._last is not None else None
        asks = advice.inputs.get("ask_up", advice.replicas) if advice is not None else None
        fleet, plan = self._fleet.value if self._fleet is not None else None, self.plan
        held = [0 if fleet is None else max(fleet.replicas_running, fleet.replicas_target)]
        if plan is not None and plan.replicas_total is not None:
            held.append(plan.replicas_total)
            asks = asks + plan.warm_replicas if isinstance(asks, int) else None
        return claim_of(self._settings, self._model, asks if isinstance(asks, int) else max(held), max(held))

    # --- what people ask --------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything known now, JSON-able; ages in ms, unknown values ``None``."""
        at_ns = now_ns()
        return {
            "epoch": self.epoch,
            "pid": os.getpid(),
            "tick": self._control.ticks,
            "mode": self._config.control.mode.value,
            "uptime_s": (at_ns - self._started_ns) / 1e9,
            "objectives": control_view.plain(self._config.objectives),
            "objectives_by_class": control_view.promises(self._config, self._model),
            "plan": control_view.plain(self.plan),
            "guard": control_view.plain(self._control.guard.status(at_ns)),
            "fleet": control_view.fleet_state(self._fleet, at_ns),
            "gateways": [control_view.gateway_state(s, at_ns) for s in self._gateways.values()],
            **control_view.tick_state(self._last, at_ns, self._config.objectives.quantile),
        }

    def overview(self) -> bytes:
        """What an operator looks at each second, as JSON; see ``control_overview.py``."""
        at_ns, config = now_ns(), self._config
        found = {
            "epoch": self.epoch,
            "tick": self._control.ticks,
            "mode": config.control.mode.value,
            "uptime_s": control_overview.short((at_ns - self._started_ns) / 1e9),
            "model": self._model,
            "models": sorted({self._model, *self._settings.models}),
            "columns": control_overview.COLUMNS,
            "promises": control_view.promises(config, self._model),
            "objective": control_overview.objective_overview(
                total(self._objective), config.prices.replica_usd_per_hour > 0
            ),
            "plan": self._stands(),
            "fleet": control_view.fleet_state(self._fleet, at_ns),
            "conditions": control_overview.conditions_overview(self.desk.conditions()),
            "decisions": control_overview.decisions_overview(self.desk.decisions(control_overview.DECISIONS_SHOWN)),
            "overrides": self.desk.overrides(),
            "knobs": self.desk.shadow(),
            **self._signals_overview(),
        }
        return msgspec.json.encode(found)

    def _signals_overview(self) -> dict[str, Any]:
        """Made once a tick, however many look; its ages are of the first look."""
        last = self._last
        if self._shown is None or self._shown[0] is not last:
            signals, quantile = None if last is None else last.signals, self._config.objectives.quantile
            self._shown = last, control_overview.signals_overview(signals, self.plan, now_ns(), quantile)
        return self._shown[1]

    def _stands(self) -> dict[str, Any]:
        """The plan's values of the whole model."""
        plan = self.plan
        if plan is None:
            return {}
        return {
            "seq": plan.seq,
            "replicas_target": plan.replicas_target,
            "warm_replicas": plan.warm_replicas,
            "affinity_strength": control_overview.short(plan.affinity_strength),
            "load_bound": control_overview.short(plan.load_bound),
            "forecast_share": control_overview.short(plan.admission.forecast_share),
            "shed_factor": control_overview.short(plan.admission.shed_factor),
            "prefill_replicas": plan.prefill_replicas,
        }

    def state_at(self, tick: int) -> dict[str, Any] | None:
        """What :meth:`state` says of a tick, as it was then; ``None``: it is not one of the last :data:`TICKS_KEPT`."""
        result = next((kept for kept in self._kept if kept.plan.seq == tick), None)
        if result is None:
            return None
        return {
            "epoch": self.epoch,
            "tick": tick,
            "objectives": control_view.plain(self._config.objectives),
            "plan": control_view.plain(result.plan),
            **control_view.tick_state(result, result.signals.now_ns, self._config.objectives.quantile),
        }

    def tenants(self) -> dict[str, Any]:
        """Usage, budget and limits of every tenant, JSON-able."""
        return self._tenants.state(wall_ns())

    def telemetry(self) -> Telemetry:
        """Its metrics; what replicas and gateways say is as of the last tick."""
        if self._last is not None:
            show_signals(self._telemetry, self._last.signals, self._config.objectives.quantile)
        return self._telemetry


def next_due_ns(due_ns: int, at_ns: int, period_ns: int) -> int:
    """First time after ``at_ns`` on the grid ``due_ns + k * period_ns``, ``k >= 1``: no drift, missed ones skipped."""
    missed = max(0, at_ns - due_ns) // period_ns
    return due_ns + (missed + 1) * period_ns
