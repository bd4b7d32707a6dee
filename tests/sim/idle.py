"""Loads that end, with faults and counts that nobody gives back: when is a fleet that may sleep asleep?"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.control import Controller
from autoscaling.simulator.faults import KINDS
from autoscaling.simulator.records import RunResult
from autoscaling.simulator.spec import Fault, Pool, Scenario, SimRequest
from autoscaling.simulator.world import World
from deployments.scaling import decide
from policies.admission.tenants import TenantBook
from policies.config import AdmissionConfig, FaultsConfig, PolicyConfig, ScalingConfig
from policies.types import GatewayReport, Plan, ReplicaReport
from tests.sim.worlds import PROFILE, SECOND, SLOW, Listed, Watcher

LOAD_S, FAULTS_UNTIL_S, LATE_S = 60.0, 80.0, 300.0
"""Load ends, the last fault ends, one request comes again."""
ZERO_AFTER_S, WINDOW_S, COLD_S = 30.0, 20.0, 8.0


@dataclass(frozen=True, slots=True)
class Idle:
    """One run."""

    words: str
    phantoms: str
    """Whose counts nobody gives back: ``gateway``, ``replica`` or ``none``."""
    result: RunResult
    watcher: Watcher
    busy_until_s: float
    """The load has ended and no fault is left: last end of a request, last fault, and the starts it may have led to."""
    asleep_s: float | None
    """From when on the fleet was at zero, target and replicas, until the late request."""
    late: str
    """How the late request ended."""
    asleep_at_end: bool


def idle(seed: int) -> Idle:
    """Run the scenario of ``seed``."""
    rng = Random(seed)
    profile = replace(rng.choice((PROFILE, SLOW)), cold_start_ms=COLD_S * 1e3)
    rate = rng.uniform(0.1, 1.5)
    requests = _requests(rng, rate)
    late = SimRequest(len(requests), round(LATE_S * SECOND), 200, 30)
    faults = tuple(_fault(rng) for _ in range(rng.randint(1, 5)))
    config = PolicyConfig(
        scaling=ScalingConfig(
            replicas_min=0, replicas_max=4, zero_after_s=ZERO_AFTER_S, down_window_s=WINDOW_S, start_backoff_s=10.0
        ),
        admission=AdmissionConfig(engine_wait_share=rng.choice((0.25, None))),
        faults=FaultsConfig(quarantine_s=0),
    )
    watcher = Watcher()
    scenario = Scenario(
        name="idle",
        source=lambda _: Listed([*requests, late]),
        pools=(Pool(profile, rng.randint(0, 2), scaler=ReplicaScaler),),
        seed=seed,
        config=config,
        gateways=rng.choice((1, 2)),
        faults=faults,
        settle_ns=round((ZERO_AFTER_S + WINDOW_S + 10) * SECOND),
        start_spread_share=0.3,
        local_rule=decide,
    )
    world = World(scenario, watcher)
    phantoms = _phantom(rng, world.controllers[0])
    result = world.run(None, None)
    words = f"seed {seed}: {rate:.2f} requests/s, {', '.join(f.kind for f in faults)}; phantoms: {phantoms}"
    return _judge(words, phantoms, result, watcher, faults, late.index)


def _requests(rng: Random, rate: float) -> list[SimRequest]:
    found: list[SimRequest] = []
    at_s = rng.expovariate(rate)
    while at_s < LOAD_S:
        found.append(SimRequest(len(found), round(at_s * SECOND), rng.randint(10, 600), rng.randint(1, 80)))
        at_s += rng.expovariate(rate)
    return found


def _fault(rng: Random) -> Fault:
    at_s = rng.uniform(0, FAULTS_UNTIL_S - 15)
    duration_s = rng.uniform(1, 15)
    factor = rng.uniform(2, 8)
    return Fault(rng.choice(KINDS), round(at_s * SECOND), round(duration_s * SECOND), rng.randrange(4), factor)


def _phantom(rng: Random, controller: Controller) -> str:
    """From some time on reports count requests that nobody has: at one gateway, at every replica, or nowhere."""
    kind, more, from_ns = rng.choice(("gateway", "replica", "none")), rng.randint(1, 5), round(rng.uniform(5, 60) * 1e9)
    if kind == "gateway":
        hear_gateway = controller.receive_gateway

        def gateway(report: GatewayReport, now_ns: int, tenants: TenantBook | None = None) -> Plan | None:
            extra = more if now_ns > from_ns and report.gateway_id == "gateway-0" else 0
            return hear_gateway(replace(report, inflight=report.inflight + extra), now_ns, tenants)

        controller.receive_gateway = gateway  # type: ignore[method-assign]
    elif kind == "replica":
        hear_replica = controller.receive_replica

        def replica(report: ReplicaReport, now_ns: int) -> Plan | None:
            extra = more if now_ns > from_ns else 0
            running, inflight = report.running + extra, report.http_inflight + extra
            return hear_replica(replace(report, running=running, http_inflight=inflight), now_ns)

        controller.receive_replica = replica  # type: ignore[method-assign]
    return kind


def _judge(
    words: str, phantoms: str, result: RunResult, watcher: Watcher, faults: tuple[Fault, ...], late: int
) -> Idle:
    rows = {row.index: row for row in result.records}
    ends = [row.arrival_ns / SECOND + row.e2e_ms / 1_000 for row in rows.values() if row.index != late]
    fault_s = max((f.at_ns + f.duration_ns) / SECOND for f in faults)
    busy_until_s = max(max(ends, default=0.0), fault_s + 2 * COLD_S)
    samples = result.pools[0].timeline
    zero = [s.target == 0 and not (s.starting or s.ready or s.draining) for s in samples]
    quiet = [(s.at_ns / SECOND, z) for s, z in zip(samples, zero, strict=True) if s.at_ns < LATE_S * SECOND]
    awake = max((at for at, z in quiet if not z), default=0.0)
    asleep_s = next((at for at, _ in quiet if at > awake), None)
    return Idle(words, phantoms, result, watcher, busy_until_s, asleep_s, rows[late].outcome, zero[-1])
