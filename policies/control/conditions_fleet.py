"""Rules about the size of the fleet: too many replicas, starts that are waited for, rises that get nowhere.

How full a fleet is, is read from the step law of each kind of engine (``peers.py``)::

    full = sum over kinds of (prefill_tps * d + decode_tps * step(B) / B) / 1000, over N

with ``B`` the largest batch within the ITL objective, the KV cache and the engine's limit

and from the engines' busy share only where no law is known: one stream keeps an engine busy at a thirtieth of what it
could carry. A rule is a function of one tick's :class:`~policies.control.facts.Facts`. It must not act or remember.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from policies.config import ObjectivesConfig
from policies.control.burn import SHORT
from policies.control.facts import Facts
from policies.control.findings import UNKNOWN, Finding
from policies.control.peers import Comparison
from policies.control.signals import ReplicaSignals
from policies.types import StepCoefficients

SPARE_HIGH, SPARE_LOW = 0.4, 0.5
"""How full one replica fewer would be, below which it can go."""

GAP_QUEUE_EACH = 2.0
"""Requests that wait per serving replica while others start."""

STUCK_S = 60.0
"""A rise makes progress within this time, or within twice the longest cold start."""

FAILED_STARTS = 3
"""Starts in a row that failed."""

KV_SHARE = 0.9
"""Share of a KV cache that can be used without preempting."""

KV_TOKENS_PRIOR = 256.0
"""KV tokens of a sequence where none runs."""


def over_provisioned(facts: Facts) -> Finding:
    """How full the fleet would be with one replica less."""
    n, work, queue = len(facts.serving), facts.signals.work, facts.queue
    if n == 0 or work is None or queue is None or facts.signals.unknown_replicas:
        return UNKNOWN
    if n <= max(1, facts.config.scaling.replicas_min):
        return Finding(False, True, {"replicas": float(n)}, f"{n} replicas, the least allowed")
    full = fullness(facts.peers, facts.config.objectives)
    if full is None:
        full = work.busy_share
    if full is None:
        return UNKNOWN
    without_one = full * n / (n - 1) if n > 1 else full
    evidence = {"replicas": float(n), "full_share": full, "full_share_without_one": without_one, "queue": float(queue)}
    text = f"{n} replicas are {full:.0%} full; one fewer would be {without_one:.0%} full"
    return Finding(without_one < SPARE_HIGH and queue == 0, without_one > SPARE_LOW or queue > 0, evidence, text)


def fullness(peers: Comparison, objectives: ObjectivesConfig) -> float | None:
    """Share of what replicas carry within the gap objective that their load takes; ``None`` without any law."""
    filled, known = 0.0, 0
    for kind, members in peers.members.items():
        law = peers.laws.get(kind)
        if law is not None:
            filled += _filled(members, law, objectives.itl_ms)
            known += len(members)
    return filled / known if known else None


def _filled(members: Sequence[ReplicaSignals], law: StepCoefficients, itl_ms: float) -> float:
    """Replicas of one kind that the load of ``members`` fills, as a fraction; their law is linear in the batch."""
    running = sum([r.latest.running for r in members])
    kv_used = sum([r.latest.kv_tokens_used for r in members])
    kv_room = KV_SHARE * members[0].latest.kv_tokens_max or math.inf
    per_seq = kv_used / running if running and kv_used else KV_TOKENS_PRIOR
    each_ms = law.b_ms + law.c_ms * per_seq / 1000
    within_gap = (itl_ms - law.a_ms) / each_ms if each_ms > 0 else math.inf
    batch = max(1.0, min(members[0].latest.running_seqs_hard, within_gap, kv_room / per_seq))
    token_ms = law.a_ms / batch + each_ms
    prefill_tps, decode_tps = sum([r.prefill_tps for r in members]), sum([r.decode_tps for r in members])
    return max((prefill_tps * law.d_ms + decode_tps * token_ms) / 1000, kv_used / kv_room)


def _longest_start_ms(facts: Facts) -> float:
    """Longest cold start that a replica told; 0 where none did."""
    return max([ms for r in facts.signals.replicas if (ms := r.latest.cold_start_ms) is not None], default=0.0)


def cold_start_gap(facts: Facts) -> Finding:
    """Replicas that are not there yet, and requests that wait for them."""
    queue_each = facts.queue_each
    if facts.starting is None or queue_each is None:
        return UNKNOWN
    worst = facts.meter.worst("ttft", SHORT)
    burn = 0.0 if worst is None else worst.burn
    evidence = {
        "starting": float(facts.starting),
        "queue_per_replica": queue_each,
        "ttft_burn": burn,
        "waited_s": facts.waited_s,
        "cold_start_ms": _longest_start_ms(facts),
    }
    waits = queue_each >= GAP_QUEUE_EACH or (burn >= 1 and queue_each > 0)
    text = f"{facts.starting} replicas start, {queue_each:.1f} requests wait per serving replica"
    return Finding(facts.starting > 0 and waits, facts.starting == 0 or queue_each == 0, evidence, text)


def stuck_scale_up(facts: Facts) -> Finding:
    """No room for a replica, none came up for longer than a start may take, or starts fail."""
    fleet = facts.signals.fleet
    if fleet is None:
        return UNKNOWN
    limit_s = max(STUCK_S, 2 * _longest_start_ms(facts) / 1000)
    missing = max(0, fleet.replicas_target - fleet.replicas_running)
    evidence = {
        "missing": float(missing),
        "unschedulable": float(fleet.unschedulable),
        "waited_s": facts.waited_s,
        "limit_s": limit_s,
    }
    late = missing > 0 and facts.waited_s > limit_s
    text = f"{missing} of {fleet.replicas_target} replicas are missing for {facts.waited_s:.0f} s"
    if fleet.unschedulable:
        text += f", {fleet.unschedulable} find no room"
    starts = facts.signals.starts
    fail = starts.failed_in_a_row >= FAILED_STARTS
    if fail:
        evidence["failed_starts"] = float(starts.failed_in_a_row)
        text += f"; {starts.failed_in_a_row} starts in a row failed, the last one because {starts.failed_why}"
    over = missing == 0 and fleet.unschedulable == 0 and not fail
    return Finding(fleet.unschedulable > 0 or late or fail, over, evidence, text)
