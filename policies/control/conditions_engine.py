"""Rules about engines: where their time goes, KV cache, preemptions, pace, progress. Formulas: ``catalogue.py``.

A rule is a function of one tick's :class:`~policies.control.facts.Facts`. It must not act, and must not remember.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from policies.affinity import PREDICTED_SHARE_MIN, REQUESTS_MIN, TRUST_HIGH, TRUST_LOW
from policies.control.burn import MIDDLE
from policies.control.facts import Facts
from policies.control.findings import UNKNOWN, Finding, certainty, named
from policies.control.signals import ReplicaSignals
from policies.control.windows import WINDOW_MS
from policies.step_model import predict_step_ms
from policies.types import ReplicaId, ReplicaReport, ReplicaState

PREFILL_HIGH, PREFILL_LOW = 0.5, 0.4
DECODE_HIGH, DECODE_LOW = 0.6, 0.5
"""Share of step time that computes prompts, or decodes, above which that is what limits."""

QUEUE_EACH = 2.0
"""Requests that wait per serving replica, from which engines are short of time."""

BURN_PRESSES = 1.0
MISSED_MIN = 5
"""Burn over 60 s, with so many misses, from which an objective presses."""

CAP_SHARE = 0.9
"""Running sequences over their cap from which the cap is reached."""

THRASH_MIN = 3
"""Preemptions of one replica within the window of reports."""

SLOW_LOW = 1.2
"""Slowness against its kind below which a replica is one of many again."""

STUCK_MS = 10_000.0
"""An engine with work makes a step within this time, or within twice its longest predicted step.

Where that is longer than the window of reports, only the replica's own word counts.
"""


def _presses(facts: Facts, objective: str) -> tuple[float, bool]:
    """Burn of an objective over 60 s by the class that burns it fastest, and whether that is a pressure.

    As for the burns themselves, time before the first report counts as calm: caches are cold then.
    """
    worst = facts.meter.worst(objective, MIDDLE)
    if worst is None:
        return 0.0, False
    return worst.burn, worst.spent >= BURN_PRESSES and worst.missed >= MISSED_MIN


def prefill_bound(facts: Facts) -> Finding:
    """Prompts take the step time, and requests feel it."""
    queue_each, share = facts.queue_each, facts.prefill_share
    if share is None or queue_each is None:
        return UNKNOWN if queue_each is None else Finding(False, True, {}, "no step has been made", 0.0)
    burn, presses = _presses(facts, "ttft")
    evidence = {"prefill_share": share, "queue_per_replica": queue_each, "ttft_burn": burn}
    high = share > PREFILL_HIGH and (queue_each >= QUEUE_EACH or presses)
    low = share < PREFILL_LOW or (queue_each < QUEUE_EACH / 4 and not presses)
    text = f"{share:.0%} of step time computes prompts, {queue_each:.1f} requests wait per replica"
    targets = _where(facts, lambda prefill: prefill, PREFILL_HIGH) if high else ()
    return Finding(high, low, evidence, text, 1.0, targets)


def decode_bound(facts: Facts) -> Finding:
    """Decoding takes the step time, and gaps are at their objective or sequences at their cap."""
    queue_each, prefill = facts.queue_each, facts.prefill_share
    if prefill is None or queue_each is None:
        return UNKNOWN if queue_each is None else Finding(False, True, {}, "no step has been made", 0.0)
    share, (burn, presses) = 1 - prefill, _presses(facts, "itl")
    running = sum([r.latest.running for r in facts.serving])
    filled = running / max(1, sum([_cap(r.latest) for r in facts.serving]))
    refuses = _refuses(facts)
    capped = filled >= CAP_SHARE and (queue_each >= QUEUE_EACH or refuses)
    evidence = {"decode_share": share, "itl_burn": burn, "cap_share": filled, "queue_per_replica": queue_each}
    high = share > DECODE_HIGH and (presses or capped)
    low = share < DECODE_LOW or (not presses and not refuses and queue_each < QUEUE_EACH / 4)
    text = f"{share:.0%} of step time decodes, {filled:.0%} of the sequences allowed run, gaps burn {burn:.1f}"
    targets = _where(facts, lambda prefill: 1 - prefill, DECODE_HIGH) if high else ()
    return Finding(high, low, evidence, text, 1.0, targets)


def _refuses(facts: Facts) -> bool:
    """Whether gates refuse more than the objectives' quantile allows: who is told to come later waits elsewhere."""
    traffic = facts.signals.traffic
    if traffic is None:
        return False
    refused_ps = sum([c.refused_ps for c in traffic.by_class.values()])
    return refused_ps > (1 - facts.config.objectives.quantile) * traffic.demand_ps


def _cap(latest: ReplicaReport) -> int:
    hard, now = latest.running_seqs_hard, latest.knobs.running_seqs_max
    return now if now is not None and now < hard else hard


def _where(facts: Facts, share_of: Callable[[float], float], limit: float) -> list[ReplicaId]:
    """Replicas whose share of step time is above ``limit``, highest first; ``share_of`` takes that of prompts."""
    known = [(r.prefill_share, r.replica_id) for r in facts.serving]
    shares = [(share_of(prefill), replica_id) for prefill, replica_id in known if prefill is not None]
    return [replica_id for share, replica_id in sorted(shares, key=lambda row: (-row[0], row[1])) if share > limit]


def kv_pressure(facts: Facts) -> Finding:
    """Every replica's share of its own cache."""
    known = [r.latest for r in facts.fresh if r.latest.kv_tokens_max > 0]
    shares = [latest.kv_tokens_used / latest.kv_tokens_max for latest in known]
    if not shares:
        return UNKNOWN
    fullest = max(shares)
    named_shares = zip(shares, known, strict=True)
    high = [(share, latest.replica_id) for share, latest in named_shares if share > 0.9 or share == fullest]
    name = max(high)[1]
    full = sorted([(-share, replica_id) for share, replica_id in high if share > 0.9])
    evidence = {"kv_share_max": fullest, "replicas": float(len(full))}
    text = f"fullest KV cache is at {fullest:.0%} ({name})"
    return Finding(fullest > 0.9, fullest < 0.8, evidence, text, 1.0, [replica_id for _, replica_id in full])


def preemption_thrash(facts: Facts) -> Finding:
    """Preemptions of each replica in its window."""
    if not facts.fresh:
        return UNKNOWN
    counts = sorted([(-r.preemptions, r.replica_id) for r in facts.fresh if r.preemptions])
    total, most = -sum([n for n, _ in counts]), -counts[0][0] if counts else 0
    thrash = [replica_id for n, replica_id in counts if -n >= THRASH_MIN]
    text = f"{total} preemptions in the window" + (f", most on {counts[0][1]}" if counts else "")
    evidence = {"preemptions": float(total), "preemptions_max": float(most)}
    return Finding(bool(thrash), total == 0, evidence, text, 1.0, thrash)


def cache_cold(facts: Facts) -> Finding:
    """What engines found cached against what routers believed."""
    work, traffic = facts.signals.work, facts.signals.traffic
    if work is None or traffic is None:
        return UNKNOWN
    realised, predicted = work.prefix_hit_share, traffic.predicted_hit_share
    dispatched = traffic.routed_ps * WINDOW_MS / 1000
    enough = work.prefix_query_tokens >= facts.config.affinity.query_tokens_min and dispatched >= REQUESTS_MIN
    if realised is None or predicted is None or predicted < PREDICTED_SHARE_MIN or not enough:
        return Finding(False, True, {}, "too few predicted cache hits to compare", 0.0)
    trust = realised / predicted
    evidence = {"realised_hit_share": realised, "predicted_hit_share": predicted, "dispatched": dispatched}
    text = f"{realised:.0%} of prompt tokens were cached, {predicted:.0%} were predicted"
    return Finding(trust < TRUST_LOW, trust >= TRUST_HIGH, evidence, text, certainty(dispatched))


def hot_spot(facts: Facts) -> Finding:
    """One replica queues while another has room."""
    replicas = [r.latest for r in facts.serving]
    if len(replicas) < 2:
        return Finding(False, bool(replicas), {}, "fewer than two replicas to compare", 0.0)
    loads = [r.running + r.waiting for r in replicas]
    mean = sum(loads) / len(loads)
    limit = facts.config.routing.load_bound * mean
    hot = sorted(
        [(-load, r.replica_id, r) for load, r in zip(loads, replicas, strict=True) if r.waiting and load > limit],
        key=lambda row: row[:2],
    )
    if not hot:
        top = max(loads)
        text = f"no replica queues above {limit:.1f} requests, the fullest holds {top}"
        return Finding(False, True, {"requests_max": float(top), "requests_mean": mean}, text)
    top, most = -hot[0][0], hot[0][2].running
    room = any(r.waiting == 0 and 2 * r.running <= min(r.running_seqs_hard, most) for r in replicas)
    names = [replica_id for _, replica_id, _ in hot]
    evidence = {"requests_max": float(top), "requests_mean": mean, "replicas": float(len(hot))}
    text = f"{named(names)} {'hold' if len(hot) > 1 else 'holds'} up to {top} requests, the mean is {mean:.1f}"
    return Finding(room, not room, evidence, text, 1.0, names)


def grey_failure(facts: Facts) -> Finding:
    """Pace against its kind, what gateways leave alone for it, and errors of the device."""
    limit = slow_limit(facts)
    slow = {name: ratio for name, ratio in facts.peers.slowness.items() if ratio > limit}
    broken = {r.replica_id for r in facts.fresh if _device_errors(r)}
    ejected = _ejected(facts)
    names = sorted({*slow, *broken, *ejected}, key=lambda name: (-slow.get(name, 0.0), name))
    if not facts.fresh and not names:
        return UNKNOWN
    worst = max(facts.peers.slowness.values(), default=1.0)
    evidence = {"slowness_max": worst, "slow": float(len(slow)), "ejected": float(len(ejected))}
    evidence["device_errors"] = float(len(broken))
    if not names:
        return Finding(False, worst < SLOW_LOW, evidence, f"the slowest replica takes {worst:.2f} x its kind's time")
    why = f"up to {worst:.1f} x its kind's time" if slow else "ejected by gateways" if ejected else "device errors"
    return Finding(True, False, evidence, f"{named(names)}: {why}{_throttled(facts, names)}", 1.0, names)


def _ejected(facts: Facts) -> set[ReplicaId]:
    """Replicas that gateways leave alone for their answers: one gateway's word, unless the engine's pace denies it."""
    heard = [g.latest for g in facts.signals.gateways if g.fresh]
    votes = Counter([replica_id for g in heard for replica_id, code in g.ejected.items() if _grey(code)])
    return {r for r, n in votes.items() if 2 * n > len(heard) or facts.peers.slowness.get(r, SLOW_LOW) >= SLOW_LOW}


def slow_limit(facts: Facts) -> float:
    """Half way, by factors, to what gateways eject for."""
    return math.sqrt(facts.config.faults.grey_factor)


def _grey(code: str) -> bool:
    return code.startswith(("grey_", "failing_share", "silent"))


def _device_errors(replica: ReplicaSignals) -> bool:
    gpu = replica.latest.gpu
    return gpu is not None and bool(gpu.ecc_errors or gpu.xid_errors)


def _throttled(facts: Facts, names: Sequence[ReplicaId]) -> str:
    reasons = sorted({
        reason
        for r in facts.fresh
        if r.latest.gpu is not None and r.replica_id in names
        for reason in r.latest.gpu.throttle
    })  # fmt: skip
    return f"; clocks held down: {', '.join(reasons)}" if reasons else ""


def stuck_replica(facts: Facts) -> Finding:
    """Work and no step."""
    if not facts.fresh:
        return UNKNOWN
    stuck = [r.replica_id for r in facts.fresh if not r.latest.steps and is_stuck(r)]
    text = f"no progress on {named(stuck)}" if stuck else "all replicas with work make progress"
    return Finding(bool(stuck), not stuck, {"replicas": float(len(stuck))}, text, 1.0, stuck)


def is_stuck(replica: ReplicaSignals) -> bool:
    """Whether a replica says it is stuck, or had work and made no step for longer than its longest step may take."""
    latest = replica.latest
    if latest.state is ReplicaState.STUCK:
        return True
    idle_ms = 0.0
    for sample in reversed(replica.window):
        if sample.value.steps or not (sample.value.running or sample.value.waiting):
            break
        idle_ms += sample.value.window_ms
    if idle_ms < STUCK_MS:
        return False
    longest_ms = 0.0
    if latest.step_model is not None:
        longest_ms = predict_step_ms(latest.step_model, latest.running, latest.kv_tokens_used, latest.step_tokens_hard)
    return idle_ms >= 2 * longest_ms
