"""Judges a replica that still answers, but slower or failing more often than its peers (grey failure).

    residual = log((ttft_ms + 20) / (predicted_ms + 20))                   one per first byte
    level   += w * (residual - level), residual kept within 2 * log(grey_factor) of the peers' median
    grey_ttft      level - max(0, peers' median) > log(grey_factor), looked at every grey_samples_min first bytes, once
                   they span 2 s

    pace     = (log(step of 8 decoding sequences) + log(step with 512 prompt tokens)) / 2, by its learned step model
    drift    = pace - its own pace before (an average over ten minutes)
    grey_steps     drift - max(0, peers' median) > log(grey_factor), looked at every 64 engine steps

    failing  = smoothed share of attempts that failed
    failing_share  failing > max(0.3, grey_factor * peers' median)

    silent         3 requests wait, the first of them for longer than 10 s and grey_factor times the longest
                   prediction among them, while peers gave grey_samples_min first bytes

    w = 2 / (1 + grey_samples_min); four times slower for failures, where one value says little. For first bytes at most
        1 - exp(-t / 2 s), t since the one before, and at least one over their number

Samples of replicas are up to a second old, and several gateways that see the same idle replica send it all they have at
once. For such a second its first bytes are late through no fault of its own, however many of them there are.

A newcomer, one that joined others, is not judged by first bytes until its step model is learned, for a minute at most:
until then predictions are those of another replica, or of few steps, and what comes first is slower (compilation, cold
caches). One that is slow from its first step on is known as such with its step model, and one that is late in spite of
it is found then.

Both kinds of slowness are needed. While a step model still believes in the old speed, first bytes come later than
predicted. Once it has learned the new one predictions are right again, and only the drift shows. Peers are compared
with, because what all see (a bad prediction, an overload, a new kind of traffic) is no fault of one. Nor is it a fault
to be as fast as predicted where peers are faster.

Predictions above 10 s are left out: they are about a queue. 20 ms more or less are nothing: short predictions would be
missed by factors through the jitter of any process.

What this must not do: eject. How many may be, :mod:`policies.faults.health` knows.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from policies.config import FaultsConfig
from policies.step_model import predict_step_ms
from policies.types import Reason, ReplicaId, StepCoefficients

FLOOR_MS = 20.0
"""Added to both sides of a residual."""

PREDICTED_MS_MAX = 10_000.0
"""Longer predictions are about a queue more than about the replica, and are not judged by."""

FAILING_SHARE_MIN = 0.3
"""A smaller share of failures is never called failing."""

FAILURE_MEMORY = 4
"""Failures are smoothed over so many times ``grey_samples_min`` attempts."""

FINGERPRINTS_MAX = 32
"""Failed requests remembered for each replica, so that a repeated one counts once."""

SMOOTHING_NS = 2 * 1_000_000_000
"""Residuals are smoothed over at least this time: some ages of samples (see the module)."""

NEWCOMER_NS = 60 * 1_000_000_000
"""Longest time for which first bytes of a replica that joined others are not judged by."""

PEER_NS = 60 * 1_000_000_000
"""Levels of replicas without a first byte for this long say nothing of today."""

STEPS_MIN = 64
"""Engine steps between two looks at a drift."""

LEARNED_STEPS_MIN = 200
"""Steps from which on a step model is believed here: the memory of its fit."""

BASELINE_NS = 600 * 1_000_000_000
"""Time constant of a replica's own earlier pace."""

SILENT_REQUESTS = 3
"""So many must wait: the router sends a replica that does not answer few more."""

SILENT_NS = 10 * 1_000_000_000
"""Silence shorter than this is nothing."""

DECODE_SEQS, DECODE_KV_TOKENS, PREFILL_TOKENS = 8, 8_192, 512
"""The two steps by which engines are compared with themselves."""


class Due(NamedTuple):
    """Which figures of a replica are to be looked at."""

    answers: bool
    steps: bool
    outcomes: bool


class Pace:
    """What one replica's first bytes, failures and step model say of it."""

    __slots__ = (
        "_baseline", "_fingerprints", "_first_ns", "_judged_answers", "_judged_outcomes", "_judged_steps", "_seen_ns",
        "_seen_steps", "_since_ns", "answered_ns", "answers", "drift", "failed_share", "level", "new_until_ns",
        "outcomes", "waiting",
    )  # fmt: skip

    def __init__(self, new_until_ns: int = 0) -> None:
        self.new_until_ns = new_until_ns
        """Its first bytes say nothing before."""
        self.level = 0.0
        """Smoothed residual."""
        self.answers = 0
        self._since_ns = 0
        """First of ``answers``."""
        self.answered_ns: int | None = None
        self.failed_share = 0.0
        self.outcomes = 0
        self.drift: float | None = None
        self.waiting: Waiting | None = None
        """Requests without a first byte since the last one; ``None``: nobody waits."""
        self._judged_answers = self._judged_outcomes = self._judged_steps = 0
        """``answers``, ``outcomes`` and steps when they were last looked at."""
        self._fingerprints: OrderedDict[int, None] = OrderedDict()
        self._baseline: float | None = None
        self._first_ns = 0
        self._seen_ns = 0
        self._seen_steps = 0

    def forget(self) -> None:
        """Begin anew after an ejection, with the earlier pace in mind."""
        self.level, self.answers, self._judged_answers, self.answered_ns = 0.0, 0, 0, None
        self.failed_share, self.outcomes, self._judged_outcomes = 0.0, 0, 0
        self.drift, self._judged_steps = None, self._seen_steps
        self.waiting = None
        self._fingerprints.clear()

    def take_answer(self, residual: float, config: FaultsConfig, now_ns: int) -> None:
        """A first byte came, at ``residual``."""
        if now_ns < self.new_until_ns:
            return
        weight = 1.0
        if self.answered_ns is None:
            self._since_ns = now_ns
        else:
            passed = 1 - math.exp((self.answered_ns - now_ns) / SMOOTHING_NS)
            weight = max(1 / (1 + self.answers), min(2 / (1 + config.grey_samples_min), passed))
        self.level += weight * (residual - self.level)
        self.answers += 1
        self.answered_ns = now_ns

    def take_outcome(self, failed: bool, fingerprint: int, config: FaultsConfig) -> None:
        """An attempt began to be answered, or failed; a request that failed here before counts no more."""
        if failed and fingerprint:
            if fingerprint in self._fingerprints:
                return
            self._fingerprints[fingerprint] = None
            if len(self._fingerprints) > FINGERPRINTS_MAX:
                self._fingerprints.popitem(last=False)
        weight = 2 / (1 + FAILURE_MEMORY * config.grey_samples_min)
        self.failed_share += weight * (failed - self.failed_share)
        self.outcomes += 1

    def take_step_model(self, model: StepCoefficients, now_ns: int) -> None:
        """Compare what the engine's step model says today with what it used to say."""
        if model.samples < LEARNED_STEPS_MIN or model.samples <= self._seen_steps:
            return
        self.new_until_ns = min(self.new_until_ns, now_ns)
        pace = pace_of(model)
        if pace is None:
            return
        if self._baseline is None:
            self._baseline, self._first_ns, self._seen_ns = pace, now_ns, now_ns
            self._judged_steps = model.samples
        span_ns = min(BASELINE_NS, max(1, now_ns - self._first_ns))
        share = 1 - math.exp(-(now_ns - self._seen_ns) / span_ns)
        self.drift = pace - self._baseline
        self._baseline += share * self.drift
        self._seen_ns, self._seen_steps = now_ns, model.samples

    def due(self, config: FaultsConfig, now_ns: int) -> Due:
        """What is to be looked at now, and is taken as looked at."""
        steps = self.drift is not None and self._seen_steps - self._judged_steps >= STEPS_MIN
        answers = self.answers - self._judged_answers >= config.grey_samples_min
        answers = answers and now_ns - self._since_ns >= SMOOTHING_NS
        outcomes = self.outcomes - self._judged_outcomes >= config.grey_samples_min
        if steps:
            self._judged_steps = self._seen_steps
        if answers:
            self._judged_answers = self.answers
        if outcomes:
            self._judged_outcomes = self.outcomes
        return Due(answers, steps, outcomes)


@dataclass(slots=True)
class Waiting:
    """Requests sent to a replica since its last first byte."""

    since_ns: int
    predicted_ms: float
    """The longest prediction among them."""
    peer_answers: int
    """First bytes of all replicas when the first of them was sent."""
    requests: int = 0


class Figures:
    """One figure of several replicas, and its median without one of them."""

    __slots__ = ("_of", "_sorted")

    def __init__(self, of: Mapping[ReplicaId, float]) -> None:
        self._of = of
        self._sorted = sorted(of.values())

    def median(self) -> float | None:
        """Median of all; ``None``: there are none."""
        return _middle(self._sorted, len(self._sorted))

    def of_others(self, replica_id: ReplicaId) -> float | None:
        """Median of all but ``replica_id``; ``None``: there are no others. O(log n)."""
        own = self._of.get(replica_id)
        values = self._sorted
        return _middle(values, len(values) if own is None else bisect_left(values, own))


def _middle(values: list[float], gap: int) -> float | None:
    """Median of sorted values, the one at ``gap`` left out."""
    n = len(values) - (gap < len(values))
    if not n:
        return None
    low, high = (n - 1) // 2, n // 2
    return (values[low + (low >= gap)] + values[high + (high >= gap)]) / 2


@dataclass(frozen=True, slots=True)
class Peers:
    """Figures of the replicas that take requests and have enough to say."""

    levels: Figures
    failed_shares: Figures
    drifts: Figures


def peers_of(paces: Iterable[tuple[ReplicaId, Pace]], config: FaultsConfig, now_ns: int) -> Peers:
    """What to compare with, from the replicas that take requests."""
    levels, failed_shares, drifts = {}, {}, {}
    for replica_id, pace in paces:
        recent = pace.answered_ns is not None and now_ns - pace.answered_ns <= PEER_NS
        if recent and pace.answers >= config.grey_samples_min:
            levels[replica_id] = pace.level
        if pace.outcomes >= config.grey_samples_min:
            failed_shares[replica_id] = pace.failed_share
        if pace.drift is not None:
            drifts[replica_id] = pace.drift
    return Peers(Figures(levels), Figures(failed_shares), Figures(drifts))


def residual_of(ttft_ms: float | None, predicted_ms: float | None) -> float | None:
    """Logarithm of how many times later than predicted a first byte came; ``None``: nothing can be said."""
    if ttft_ms is None or predicted_ms is None:
        return None
    if not (0 <= ttft_ms < math.inf and 0 <= predicted_ms <= PREDICTED_MS_MAX):
        return None
    return math.log((ttft_ms + FLOOR_MS) / (predicted_ms + FLOOR_MS))


def clipped(residual: float, typical: float, config: FaultsConfig) -> float:
    """The residual within twice the factor around what is typical: one value alone must not judge."""
    reach = 2 * math.log(config.grey_factor)
    return max(typical - reach, min(typical + reach, residual))


def pace_of(model: StepCoefficients) -> float | None:
    """Logarithm of the time of a typical step; ``None`` where the model says that one takes none."""
    decode_ms = predict_step_ms(model, DECODE_SEQS, DECODE_KV_TOKENS, 0)
    prefill_ms = predict_step_ms(model, 1, 0, PREFILL_TOKENS)
    return (math.log(decode_ms) + math.log(prefill_ms)) / 2 if decode_ms > 0 and prefill_ms > 0 else None


def judge(replica_id: ReplicaId, pace: Pace, due: Due, peers: Peers, config: FaultsConfig) -> Reason | None:
    """Why the replica is worse than its peers by what is due for a look; ``None``: it is not."""
    limit = math.log(config.grey_factor)
    if due.answers:
        typical = peers.levels.of_others(replica_id)
        if typical is not None and pace.level - max(0.0, typical) > limit:
            return Reason(
                "grey_ttft",
                f"its first tokens take {math.exp(pace.level):.1f} times as long as predicted, "
                f"those of its peers {math.exp(typical):.1f} times",
            )
    if due.steps and pace.drift is not None:
        typical = peers.drifts.of_others(replica_id)
        if typical is not None and pace.drift - max(0.0, typical) > limit:
            return Reason(
                "grey_steps",
                f"its engine takes {math.exp(pace.drift):.1f} times as long for a step as it used to, "
                f"those of its peers {math.exp(typical):.1f} times",
            )
    if due.outcomes:
        typical = peers.failed_shares.of_others(replica_id)
        if typical is not None and pace.failed_share > max(FAILING_SHARE_MIN, config.grey_factor * typical):
            return Reason(
                "failing_share", f"{pace.failed_share:.0%} of its requests failed, of those of its peers {typical:.0%}"
            )
    return None


def judge_silence(pace: Pace, answers: int, config: FaultsConfig, now_ns: int) -> Reason | None:
    """Whether the replica gives no first byte where it should; ``answers`` are the first bytes of all replicas."""
    waiting = pace.waiting
    if waiting is None or waiting.requests < SILENT_REQUESTS:
        return None
    waited_ns = now_ns - waiting.since_ns
    if waited_ns < max(SILENT_NS, config.grey_factor * waiting.predicted_ms * 1e6):
        return None
    if answers - waiting.peer_answers < config.grey_samples_min:
        return None
    return Reason(
        "silent",
        f"{waiting.requests} requests got no first token within {waited_ns / 1e9:.0f} s, "
        f"at most {waiting.predicted_ms / 1e3:.1f} s were predicted",
    )
