"""A small fleet in which nothing stays: replicas, gateways, tenants, overrides and loads come and go.

Drives a :class:`~policies.control.loop.ControlState` with made-up reports, as coarse in time as its user likes; takes
a census of the objects that hang off it. For what must not grow with time, whatever else it says.
"""

from __future__ import annotations

import gc
import math
import sys
from collections import Counter
from collections.abc import Iterable
from random import Random
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from policies.control.loop import ControlState, tick
from policies.control.overrides import OVERRIDES_MAX
from policies.measures import ClassCounts, TenantCounts
from policies.steering import Knob, Override
from policies.types import (
    LATENCY_BOUNDS_MS,
    FleetView,
    GatewayReport,
    Histogram,
    Knobs,
    Plan,
    ReplicaReport,
    ReplicaState,
    StepCoefficients,
)

SECOND_NS = 1_000_000_000
CLASSES = ("interactive", "standard", "batch")
_KINDS = (FunctionType, BuiltinFunctionType, MethodType, ModuleType, type)
"""What a program consists of; not looked into."""


class Churn:
    """The fleet. ``lives_ticks`` is how long a replica stays, on average."""

    def __init__(self, state: ControlState, seed: int, replicas: int = 8, lives_ticks: float = 60.0) -> None:
        self.state = state
        self._rng = Random(seed)
        self._lives_ticks = lives_ticks
        self.made = 0
        """Names so far, of whatever."""
        self._replicas = [self._name("replica") for _ in range(replicas)]
        self._gateways = [self._name("gateway") for _ in range(3)]
        self._seqs: Counter[str] = Counter()
        self._level = 1.0
        self._plan: Plan | None = None

    def _name(self, kind: str) -> str:
        self.made += 1
        return f"{kind}-{self.made:06d}"

    def settle(self, replicas: int) -> frozenset[str]:
        """Nothing comes and goes from now on, and only so many replicas are left; the names that stay."""
        self._lives_ticks = math.inf
        self._replicas = self._replicas[:replicas]
        return frozenset([*self._replicas, *self._gateways])

    def tick(self, now_ns: int, seconds: float) -> None:
        """``seconds`` of the fleet's life, reported and decided upon at ``now_ns``."""
        rng, state = self._rng, self.state
        self._change(now_ns)
        for name in self._replicas:
            state.receive_replica(self._replica(name, seconds), now_ns)
        for name in self._gateways:
            state.receive_gateway(self._gateway(name, seconds), now_ns)
        n = len(self._replicas)
        state.receive_fleet(FleetView(n, max(1, n + rng.choice((0, 0, 0, 1, -1))), 1, 2 * n), now_ns)
        self._plan = tick(state, now_ns).plan

    def _change(self, now_ns: int) -> None:
        """New names, another load, something set by hand or taken back."""
        rng = self._rng
        if self._lives_ticks == math.inf:
            return
        self._replicas = [self._name("replica") if rng.random() < 1 / self._lives_ticks else n for n in self._replicas]
        self._gateways = [self._name("gateway") if rng.random() < 0.01 else n for n in self._gateways]
        if rng.random() < 0.2:
            self._level = rng.choice((0.0, 0.3, 1.0, 1.0, 2.0, 4.0))
        if rng.random() < 0.05 and len(self.state.overrides) < OVERRIDES_MAX:
            self.made += 1
            knob = rng.choice((Knob.RUNNING_SEQS_MAX, Knob.STEP_TOKENS_MAX, Knob.REPLICAS_TARGET, Knob.LOAD_BOUND))
            target = rng.choice(self._replicas) if knob.per_replica else "*"
            value = rng.choice((4, 64)) if knob.per_replica else 2
            ends_ms = rng.uniform(60_000, 900_000)
            self.state.overrides.put(Override(f"o{self.made}", knob, target, value, remaining_ms=ends_ms), now_ns)
        if rng.random() < 0.01:
            for override in self.state.overrides.in_force(now_ns)[:2]:
                self.state.overrides.drop(override.id, now_ns)

    def _histogram(self, middle: int, count: int) -> Histogram:
        counts = [0] * (len(LATENCY_BOUNDS_MS) + 1)
        for bucket in range(middle - 2, middle + 3):
            counts[bucket] = self._rng.randrange(count + 1)
        return Histogram(tuple(counts), sum(counts) * LATENCY_BOUNDS_MS[middle])

    def _replica(self, name: str, seconds: float) -> ReplicaReport:
        rng, level = self._rng, self._level * self._rng.uniform(0.8, 1.2)
        self._seqs[name] += 1
        running = min(64, round(24 * level))
        wish = self._plan.knobs.get(name, Knobs()) if self._plan is not None else Knobs()
        seqs = wish.running_seqs_max or 64
        return ReplicaReport(
            replica_id=name,
            model="m",
            seq=self._seqs[name],
            window_ms=seconds * 1_000,
            state=ReplicaState.READY,
            running=running,
            waiting=max(0, round(24 * level) - 64),
            http_inflight=running,
            kv_tokens_used=running * 1_000,
            kv_tokens_max=80_000,
            prefill_tokens=round(4_000 * level * seconds),
            decode_tokens=round(1_500 * min(level, 2.0) * seconds),
            prefix_query_tokens=round(9_000 * level * seconds),
            prefix_hit_tokens=round(rng.uniform(0.1, 0.6) * 9_000 * level * seconds),
            preemptions=rng.choice((0, 0, 0, 4)) if level > 1.5 else 0,
            steps=round(30 * min(1.0, level) * seconds),
            busy_share=min(1.0, 0.5 * level),
            gpu_utilisation_share=None,
            itl=self._histogram(6 + round(level), round(300 * level)),
            step_model=StepCoefficients(20.0, rng.uniform(0.4, 0.6), 0.05, 0.1, 1_000, 0.05, rng.randrange(2)),
            knobs=Knobs(rng.choice((7, seqs, seqs, seqs, seqs)), wish.step_tokens_max or 2_048, None),
            running_seqs_hard=64,
            step_tokens_hard=2_048,
            finished=round(8 * level * seconds),
            aborted=0,
            cold_start_ms=30_000.0,
            plan_seq=self._plan.seq if self._plan is not None else None,
        )

    def _gateway(self, name: str, seconds: float) -> GatewayReport:
        rng = self._rng
        self._seqs[name] += 1
        arrivals = round(20 * self._level * seconds * rng.uniform(0.8, 1.2))
        met = round(arrivals * rng.uniform(0.6, 1.0))
        counts = ClassCounts(arrivals=arrivals, succeeded=arrivals, met=met, late_ttft=arrivals - met)
        tenants = {f"tenant-{rng.randrange(100_000)}": TenantCounts(1, 1, 1, 0, 900) for _ in range(8)}
        prompts = dict.fromkeys(self._replicas, 900 * arrivals // len(self._replicas))
        return GatewayReport(
            gateway_id=name,
            model="m",
            seq=self._seqs[name],
            window_ms=seconds * 1_000,
            ttft=self._histogram(10 + round(self._level), arrivals),
            itl=self._histogram(7, 10 * arrivals),
            e2e=self._histogram(20, arrivals),
            arrivals=arrivals,
            succeeded=arrivals,
            failed={"client_gone": 1},
            prompt_tokens=900 * arrivals,
            output_tokens=150 * arrivals,
            inflight=round(50 * self._level),
            queued=rng.choice((0, 0, 9)) if self._level > 1 else 0,
            routed=dict.fromkeys(self._replicas, arrivals // len(self._replicas)),
            predicted_prompt_tokens=prompts,
            predicted_hit_tokens={r: n // 2 for r, n in prompts.items()},
            ttft_error_ms=self._histogram(6, arrivals),
            met=met,
            by_class={rng.choice(CLASSES): counts},
            by_tenant=tenants,
            ejected={r: "grey_ttft" for r in self._replicas if rng.random() < 0.02},
            overrides=self._plan.overrides if self._plan is not None else (),
        )


def objects(root: object, besides: Iterable[object] = ()) -> list[Any]:
    """Everything that hangs off ``root``, but for ``besides`` and code."""
    seen = {id(one) for one in besides}
    found, todo = [], [root]
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, _KINDS):
            continue
        seen.add(id(one))
        found.append(one)
        todo.extend(gc.get_referents(one))
    return found


def census(root: object) -> tuple[Counter[str], int]:
    """Objects that hang off ``root``, by type, and the bytes they take."""
    found = objects(root)
    return Counter(type(one).__name__ for one in found), sum(sys.getsizeof(one) for one in found)
