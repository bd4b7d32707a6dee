"""A rig for the guard rails: a fleet whose kept promises depend on the plan in a way the test chooses.

Every usual lever is off; scripted ones move what the test wants moved. Engines follow the plan one second later, within
their own limits, and Serve follows it at once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from autoscaling.recommend import ReplicaScaler
from policies.config import AdmissionConfig, AffinityConfig, BatchingConfig, ControlConfig, PolicyConfig, ScalingConfig
from policies.config_guard import GuardConfig, SpeculationConfig
from policies.control.levers import LeverView
from policies.control.loop import ControlState, TickResult, tick
from policies.control.moves import Move, Place, Value, Wishes
from policies.steering import ANY, Knob, Lever
from policies.types import Decision, FleetView, GatewayReport, Knobs, Mode, Plan, Reason
from tests.unit.control.fleet import SECOND_NS, gateway_report, replica_report

SHARE: Place = (Knob.FORECAST_SHARE, ANY)
"""A knob of the model for scripted levers."""

REPLICAS: Place = (Knob.REPLICAS_TARGET, ANY)


def quiet_config(guard: GuardConfig | None = None, mode: Mode = Mode.ACT) -> PolicyConfig:
    """Only scripted levers act."""
    return PolicyConfig(
        admission=AdmissionConfig(adaptive=False),
        affinity=AffinityConfig(enabled=False),
        batching=BatchingConfig(enabled=False),
        scaling=ScalingConfig(enabled=False),
        speculation=SpeculationConfig(enabled=False),
        control=ControlConfig(mode=mode),
        guard=guard or GuardConfig(),
    )


class Scripted:
    """A lever that moves its places when ``script`` says so: tick and present values in, new values out."""

    def __init__(
        self,
        lever: Lever,
        values: dict[Place, Value],
        script: Callable[[int, dict[Place, Value]], dict[Place, Value]],
        *,
        urgent: bool = False,
    ) -> None:
        self.lever = lever
        self.values = values
        self.script = script
        self.urgent = urgent
        self.ticks = 0

    @property
    def wishes(self) -> Wishes:
        return self.values

    def propose(self, view: LeverView, now_ns: int) -> Sequence[Move]:
        self.ticks += 1
        changes = {p: v for p, v in self.script(self.ticks, self.values).items() if v != self.values[p]}
        if not changes:
            return ()
        before = {place: self.values[place] for place in changes}
        self.values = self.values | changes
        target = next(iter(changes))[1]
        return (Move(self.lever, target, before, changes, Reason("Script", "the script says so"), urgent=self.urgent),)

    def adopt(self, in_force: Wishes, now_ns: int) -> None:
        self.values = {place: in_force.get(place, value) for place, value in self.values.items()}


class Rig:
    """See the module.

    Args:
        config: of the controller.
        levers: scripted ones.
        share: of the requests that keep their promises under a plan.
        demand: requests per second, by second.
        seed: of the noise.
    """

    def __init__(
        self,
        config: PolicyConfig,
        levers: Sequence[Scripted],
        share: Callable[[Plan | None], float] = lambda _: 0.95,
        demand: Callable[[int], float] = lambda _: 40.0,
        replicas: int = 4,
        seed: int = 1,
    ) -> None:
        self.config, self.levers, self.share, self.demand = config, levers, share, demand
        self.rng = random.Random(seed)
        self.now_ns, self.seconds = 1_000 * SECOND_NS, 0
        self.replicas, self.target = replicas, replicas
        self.knobs = {f"r{i}": Knobs(16, 2_048, None) for i in range(1, 1 + replicas)}
        self.foreign: dict[str, Knobs] = {}
        """What somebody else makes an engine run, whatever the plan says."""
        self.results: list[TickResult] = []
        self.echo: Plan | None = None
        """The plan whose overrides the gateway tells."""
        self.begin("life1")

    def begin(self, epoch: str) -> None:
        """A new life of the controller."""
        self.plan: Plan | None = None
        self.state = ControlState(self.config, ReplicaScaler(self.config), epoch, self.levers)

    def second(self) -> TickResult:
        """One second of load, reports, and one tick."""
        self.now_ns += SECOND_NS
        self.seconds += 1
        for name in sorted(self.knobs)[: self.replicas]:
            self._engine(name)
        self.state.receive_gateway(self._gateway(), self.now_ns)
        self.state.receive_fleet(FleetView(self.replicas, self.target, 1, 16), self.now_ns)
        result = tick(self.state, self.now_ns)
        self.plan = self.echo = result.plan
        self.results.append(result)
        return result

    def run(self, seconds: int) -> list[Decision]:
        """Several seconds; the entries written in them."""
        return [d for _ in range(seconds) for d in self.second().decisions]

    def _engine(self, name: str) -> None:
        wish = self.plan.knobs.get(name, Knobs()) if self.plan is not None else Knobs()
        followed = Knobs(max(4, min(16, wish.running_seqs_max or 16)), min(2_048, wish.step_tokens_max or 2_048), None)
        self.knobs[name] = self.foreign.get(name, followed)
        seq = None if self.plan is None else self.plan.seq
        report = replica_report(name, self.seconds, knobs=self.knobs[name], plan_seq=seq, busy_share=0.5, steps=10)
        self.state.receive_replica(report, self.now_ns)

    def _gateway(self) -> GatewayReport:
        arrivals = round(self.demand(self.seconds) * self.rng.uniform(0.8, 1.2))
        share = min(1.0, max(0.0, self.share(self.plan)))
        met = sum(self.rng.random() < share for _ in range(arrivals))
        overrides = () if self.echo is None else self.echo.overrides
        return gateway_report(
            seq=self.seconds, arrivals=arrivals, succeeded=arrivals, met=met, overrides=overrides, inflight=10
        )

    def ticks_of(self, code: str) -> list[int]:
        """Ticks at which the guard wrote entries with this reason."""
        return [d.tick for r in self.results for d in r.decisions if d.reason.code == code]


def every(ticks: int, value: float, begin: int = 40) -> Callable[[int, dict[Place, Value]], dict[Place, Value]]:
    """A script that asks for ``value`` at every place, again and again."""

    def script(now: int, values: dict[Place, Value]) -> dict[Place, Value]:
        return dict.fromkeys(values, value) if now >= begin and (now - begin) % ticks == 0 else {}

    return script


def knob_share(values: dict[float, float], otherwise: float = 0.95) -> Callable[[Plan | None], float]:
    """Share of kept promises by the forecast share in the plan."""
    return lambda plan: otherwise if plan is None else values.get(plan.admission.forecast_share or -1.0, otherwise)


def with_guard(config: PolicyConfig, **changes: object) -> PolicyConfig:
    return replace(config, guard=replace(config.guard, **changes))  # type: ignore[arg-type]
