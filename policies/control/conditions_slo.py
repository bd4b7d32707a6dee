"""Rules about promises and traffic: SLO burns, queue, retries, silence. Formulas: ``catalogue.py``, ``burn.py``.

A rule is a function of one tick's :class:`~policies.control.facts.Facts`. It must not act, and must not remember.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.control.burn import LONG, MIDDLE, SHORT, Burn
from policies.control.facts import QUEUE_TICKS, Facts
from policies.control.findings import UNKNOWN, Finding, certainty, named
from policies.control.windows import WINDOW_MS
from policies.types import ReplicaState

BURN_FAST = 3.0
BURN_SLOW = 1.5
BURN_ENDED = 1.0

MISSED_MIN = 5
"""Misses in the long window, and :data:`MISSED_SHORT_MIN` in the short one, below which no burn is called one."""

MISSED_SHORT_MIN = 1

QUEUE_MIN = 4
"""A shorter queue is never called growing."""

EXTRA_MIN = 10
"""Extra attempts within the window of reports below which there is no storm."""


def slo_burn_fast(facts: Facts) -> Finding:
    """60 s and 5 s at three times what the budget earns."""
    return _burns(facts, MIDDLE, SHORT, BURN_FAST)


def slo_burn_slow(facts: Facts) -> Finding:
    """12 min and 60 s at one and a half times what the budget earns."""
    return _burns(facts, LONG, MIDDLE, BURN_SLOW)


def limit_of(burn: Burn, factor: float) -> float:
    """The burn that is too much: ``factor``, but no more than a miss share half way between budget and everything."""
    return min(factor, (1 + burn.budget) / (2 * burn.budget))


def _burns(facts: Facts, long: int, short: int, factor: float) -> Finding:
    traffic = facts.signals.traffic
    if traffic is None:
        return UNKNOWN
    pairs = list(zip(facts.meter.burns(long), facts.meter.burns(short), strict=True))
    burning = sorted(
        [(a, b) for a, b in pairs if _burns_now(a, b, factor)], key=lambda pair: (-pair[0].burn, pair[0].sli)
    )
    hangs = traffic.inflight > 0
    goes_on = any(a.burn >= BURN_ENDED and (b.burn >= BURN_ENDED if b.counted else hangs) for a, b in pairs)
    counted = [a for a, _ in pairs if a.counted]
    if not counted:
        return Finding(False, True, {}, "nothing was counted", 0.0)
    worst = burning[0][0] if burning else max(counted, key=lambda b: b.burn)
    text = f"{worst.sli}: {worst.share:.1%} missed, {worst.budget:.1%} may: burn {worst.burn:.1f}"
    return Finding(
        high=bool(burning),
        low=not goes_on,
        evidence=_burn_evidence(counted, worst),
        text=text,
        certainty=certainty(worst.counted),
        burning=tuple(a.sli for a, _ in burning),
    )


def _burns_now(long: Burn, short: Burn, factor: float) -> bool:
    limit = limit_of(long, factor)
    enough = long.missed >= MISSED_MIN and short.missed >= MISSED_SHORT_MIN
    return enough and long.spent >= limit and short.burn >= limit


def _burn_evidence(counted: Sequence[Burn], worst: Burn) -> dict[str, float]:
    """``OBJECTIVE_burn`` of the class that burns it fastest, and the counts behind the worst of all."""
    evidence: dict[str, float] = {}
    for burn in counted:
        key = f"{burn.sli.rpartition('/')[2]}_burn"
        evidence[key] = max(evidence.get(key, 0.0), round(burn.burn, 3))
    return {**evidence, "missed": worst.missed, "counted": worst.counted, "budget": round(worst.budget, 6)}


def queue_growing(facts: Facts) -> Finding:
    """Newer half of the last ticks against the older half."""
    queues, queue = facts.queues, facts.queue
    if queue is None or len(queues) < QUEUE_TICKS // 2:
        return UNKNOWN
    half = len(queues) // 2
    older, newer = sum(queues[:half]) / half, sum(queues[-half:]) / half
    evidence = {"queue": float(queue), "older_mean": older, "newer_mean": newer}
    traffic = facts.signals.traffic
    if traffic is not None:
        evidence |= {"arrivals_ps": traffic.arrivals_ps, "succeeded_ps": traffic.succeeded_ps}
    enough = queue >= max(QUEUE_MIN, len(facts.serving))
    high = enough and newer >= 1.5 * older and newer - older >= 2
    text = f"queue went from {older:.1f} to {newer:.1f} within {len(queues)} ticks"
    return Finding(high, queue < 2 or newer < 1.1 * older, evidence, text, len(queues) / QUEUE_TICKS)


def retry_storm(facts: Facts) -> Finding:
    """Attempts beyond the first, of gateways and of clients that come again, against first arrivals."""
    traffic = facts.signals.traffic
    if traffic is None:
        return UNKNOWN
    extra_ps = traffic.retries_ps + traffic.repeats_ps
    first_ps = max(0.0, traffic.arrivals_ps - traffic.repeats_ps)
    allowed = facts.config.faults.retry_share_max
    count = extra_ps * WINDOW_MS / 1000
    evidence = {
        "first_arrivals_ps": first_ps,
        "gateway_retries_ps": traffic.retries_ps,
        "client_repeats_ps": traffic.repeats_ps,
    }
    high = count >= EXTRA_MIN and extra_ps > allowed * first_ps
    low = count < EXTRA_MIN / 2 or extra_ps < allowed / 2 * first_ps
    text = f"{extra_ps:.2f} extra attempts a second on {first_ps:.2f} requests, at most {allowed:.0%} is meant"
    return Finding(high, low, evidence, text, certainty(count))


def signal_loss(facts: Facts) -> Finding:
    """Who should speak and does not."""
    signals = facts.signals
    silent_gateways = signals.gateways_known - signals.gateways_fresh
    evidence = {
        "unknown_replicas": float(signals.unknown_replicas),
        "silent_gateways": float(silent_gateways),
        "blind": float(signals.blind),
    }
    known = len(signals.replicas) + signals.gateways_known
    if known == 0 and signals.unknown_replicas == 0:
        return Finding(False, False, {}, "nobody has reported yet", 0.0)
    lost = signals.blind or signals.unknown_replicas > 0 or (known > 0 and signals.gateways_fresh == 0)
    silent = [
        r.replica_id for r in signals.replicas if not r.fresh and r.latest.state is not ReplicaState.DRAINING
    ] if lost else []  # fmt: skip
    text = f"{signals.unknown_replicas} replicas run and say nothing, {signals.gateways_fresh} gateways report"
    if silent:
        text += f"; silent: {named(silent)}"
    return Finding(lost, not lost, evidence, "blind: no fresh report at all" if signals.blind else text, 1.0, silent)
