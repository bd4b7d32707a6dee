"""Decides which replicas get no requests from this gateway, because they fail or are worse than their peers.

    blocked(now) = those whose breaker is OPEN, or HALF_OPEN with a probe under way

A breaker (:mod:`policies.faults.breaker`) is opened by

* failures in a row, whatever the others do: where all replicas fail, all are left alone, and clients are told when the
  next probe may go (``retry_after_s``);
* a comparison with peers (:mod:`policies.faults.grey`), for at most ``ejected_share_max`` of the members, rounded down,
  and only while another replica takes requests. When members leave, or breakers open, so that this would no longer
  hold, the replicas judged first come back.

Every attempt is told: ``sent``, then at most once ``answered`` (its first body byte, a status below 500) or
``withdrew``, and ``failed`` when it broke, also after its first byte. A probe of a replica that was ejected for its
first tokens must be as fast as its peers, else it has failed.

A replica that leaves and comes again has not changed: gateways drop one whose port refuses them, until Serve names it
again. So the last :data:`GONE_MAX` that left are remembered.

What this must not do: rank replicas, or end what runs on one that is blocked.
"""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from itertools import islice

from policies.config import FaultsConfig
from policies.faults.breaker import Breaker, BreakerState
from policies.faults.grey import (
    NEWCOMER_NS,
    Pace,
    Peers,
    Waiting,
    clipped,
    judge,
    judge_silence,
    peers_of,
    residual_of,
)
from policies.types import Reason, ReplicaId, RouteChoice, StepCoefficients

PROBE_WAIT_S = 1.0
"""Told to clients when all replicas have a probe under way: nobody knows when it ends."""

STEP_MODELS_AT_ONCE = 64
"""Step models that one update looks at; in larger fleets replicas take turns."""

GONE_MAX = 256
"""Replicas remembered after they left; the one that left first goes first."""

PEERS_NS = 1_000_000_000
"""Figures of peers are collected anew after this time."""

FAILURES = "failures"
"""Code of ejections for failures in a row; the others are those of :mod:`policies.faults.grey`."""

CODES = (FAILURES, "grey_ttft", "grey_steps", "failing_share", "silent")
"""All codes of ejections."""

PROBATION = "probation"
"""Code of a choice that sends a request to a replica because that is due for one, and not because it is the best."""

_PROBE = ", and a probe no better"


@dataclass(frozen=True, slots=True)
class ReplicaHealthState:
    """One replica for metrics and people."""

    state: BreakerState
    code: str
    """Why it was ejected; empty while it is closed."""
    reason: str
    failures: int
    """Failures of different requests in a row."""
    failed_share: float
    """Smoothed share of attempts that failed."""
    ttft_factor: float | None
    """First tokens take so many times what was predicted; ``None``: too few came."""
    step_factor: float | None
    """Steps take so many times what they used to; ``None``: unknown."""


class _Replica:
    __slots__ = ("breaker", "pace")

    def __init__(self, new_until_ns: int) -> None:
        self.breaker = Breaker()
        self.pace = Pace(new_until_ns)


class ReplicaHealth:
    """The breakers of one gateway's replicas. Bounded by membership: what is told of unknown replicas is dropped."""

    def __init__(self, config: FaultsConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng
        self._replicas: dict[ReplicaId, _Replica] = {}
        self._gone: OrderedDict[ReplicaId, _Replica] = OrderedDict()
        self._away: dict[ReplicaId, Breaker] = {}
        """Those not CLOSED, ejected first first."""
        self._blocked: frozenset[ReplicaId] = frozenset()
        self._changes_ns: int | None = None
        """When ``_blocked`` may change by time alone."""
        self._probe_ns: int | None = None
        """When the first replica is due for a probe."""
        self._ejections = dict.fromkeys(CODES, 0)
        self._answers = 0
        self._peers: Peers | None = None
        self._peers_ns = 0
        self._turn = 0

    # --- what happens -------------------------------------------------------------------------------------------------

    def update(
        self,
        members: Collection[ReplicaId],
        now_ns: int,
        step_model_of: Callable[[ReplicaId], StepCoefficients | None] | None = None,
    ) -> None:
        """Take Serve's members; those that left are forgotten, and those that fell silent or became slow are judged.

        ``step_model_of`` gives the step model that a replica itself has learned; it is asked for some of them.
        """
        new_until_ns = now_ns + NEWCOMER_NS if self._replicas else 0
        for replica_id in sorted(self._replicas.keys() - set(members)):
            self._leave(replica_id)
        for replica_id in members:
            if replica_id not in self._replicas:
                self._join(replica_id, new_until_ns)
        if step_model_of is not None:
            self._take_step_models(step_model_of, now_ns)
        for replica_id, replica in self._replicas.items():
            if replica.pace.waiting is not None and replica.breaker.state is BreakerState.CLOSED:
                reason = judge_silence(replica.pace, self._answers, self._config, now_ns)
                if reason is not None:
                    self._eject_outlier(replica_id, reason, now_ns)
        self._balance(now_ns)

    def forget(self, replica_id: ReplicaId) -> None:
        """Drop all that is known of a replica, for good."""
        self._leave(replica_id)
        self._gone.pop(replica_id, None)

    def sent(self, replica_id: ReplicaId, now_ns: int, predicted_ms: float | None = None) -> None:
        """A request was sent to the replica, its first byte expected after ``predicted_ms``.

        ``None`` where nothing can be expected, as of an answer that comes as a whole.
        """
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        if replica.breaker.state is not BreakerState.CLOSED:
            replica.breaker.sent(now_ns, predicted_ms)
            self._refresh(now_ns)
        elif predicted_ms is not None:
            waiting = replica.pace.waiting
            if waiting is None:
                waiting = replica.pace.waiting = Waiting(now_ns, predicted_ms, self._answers)
            waiting.requests += 1
            waiting.predicted_ms = max(waiting.predicted_ms, predicted_ms)

    def answered(
        self, replica_id: ReplicaId, now_ns: int, ttft_ms: float | None = None, predicted_ms: float | None = None
    ) -> None:
        """The replica began to answer, with any status below 500: ``ttft_ms`` after it was sent the request, where
        ``predicted_ms`` were expected. ``None`` where an answer says nothing about speed: an error, or one that comes
        as a whole.
        """
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        breaker, pace = replica.breaker, replica.pace
        self._answers += 1
        residual = residual_of(ttft_ms, predicted_ms)
        if breaker.state is not BreakerState.CLOSED:
            self._probed(replica_id, breaker, residual, now_ns)
            return
        breaker.count_answer()
        pace.waiting = None
        pace.take_outcome(False, 0, self._config)
        if residual is not None:
            pace.take_answer(clipped(residual, self._typical(now_ns), self._config), self._config, now_ns)
        self._judge(replica_id, pace, now_ns)

    def failed(self, replica_id: ReplicaId, fingerprint: int, now_ns: int) -> None:
        """An attempt failed: no connection (give ``fingerprint`` 0), broken off, timed out, or a status from 500 on.

        Counts as well where the replica was dropped for it already.
        """
        replica = self._replicas.get(replica_id) or self._gone.get(replica_id)
        if replica is None:
            return
        breaker, pace = replica.breaker, replica.pace
        if breaker.state is not BreakerState.CLOSED:
            if breaker.probing:
                self._eject(replica_id, _again(breaker), now_ns)
            return
        _one_less(pace)
        pace.take_outcome(True, fingerprint, self._config)
        if breaker.count_failure(fingerprint, self._config):
            self._eject(replica_id, Reason(FAILURES, f"{breaker.failures} requests in a row failed"), now_ns)
        elif replica_id in self._replicas:
            self._judge(replica_id, pace, now_ns)

    def withdrew(self, replica_id: ReplicaId, now_ns: int) -> None:
        """An attempt ended without a verdict on the replica: its client left, or the replica drains."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            return
        if replica.breaker.state is BreakerState.CLOSED:
            _one_less(replica.pace)
        else:
            replica.breaker.withdrawn()
            self._refresh(now_ns)

    # --- what follows -------------------------------------------------------------------------------------------------

    def blocked(self, now_ns: int) -> frozenset[ReplicaId]:
        """Replicas that take no requests now; the same object as before while nothing changed."""
        if self._changes_ns is not None and now_ns >= self._changes_ns:
            for replica_id, breaker in [(r, b) for r, b in self._away.items() if b.unanswered(now_ns)]:
                self._eject(replica_id, _again(breaker), now_ns)
            self._refresh(now_ns)
        return self._blocked

    def probe_due(self, now_ns: int, takes: Callable[[ReplicaId], bool]) -> ReplicaId | None:
        """A replica on probation that was sent nothing for a while: the next request should go there; ``None``: none.

        ``takes`` says whether it takes requests otherwise. See :func:`with_probe`.
        """
        if self._probe_ns is None or now_ns < self._probe_ns:
            return None
        due = [
            (t, r) for r, b in self._away.items() if (t := b.probe_due_ns()) is not None and t <= now_ns and takes(r)
        ]
        return min(due)[1] if due else None

    def ejected(self) -> Mapping[ReplicaId, str]:
        """Replicas that are left alone or on probation, and the code why (:data:`CODES`)."""
        return {replica_id: self._away[replica_id].code for replica_id in sorted(self._away)}

    def reason(self, replica_id: ReplicaId) -> str:
        """Why the replica is ejected, for people; empty: it is not."""
        breaker = self._away.get(replica_id)
        return breaker.text if breaker is not None else ""

    def state(self, replica_id: ReplicaId) -> BreakerState:
        """The replica's own; strangers are CLOSED."""
        replica = self._replicas.get(replica_id)
        return BreakerState.CLOSED if replica is None else replica.breaker.state

    def retry_after_s(self, now_ns: int) -> float | None:
        """Seconds until the next probe may go while all replicas are blocked; ``None``: some replica takes requests."""
        if not self._replicas or len(self.blocked(now_ns)) < len(self._replicas):
            return None
        open_ns = [t for b in self._away.values() if b.state is BreakerState.OPEN and (t := b.changes_ns()) is not None]
        return max(0.0, (min(open_ns) - now_ns) / 1e9) if open_ns else PROBE_WAIT_S

    def states(self) -> Mapping[ReplicaId, ReplicaHealthState]:
        """All replicas."""
        return {r: _state_of(replica, self._config) for r, replica in self._replicas.items()}

    def ejections(self) -> Mapping[str, int]:
        """Ejections so far, by code (:data:`CODES`); a failed probe counts again."""
        return dict(self._ejections)

    # --- judging ------------------------------------------------------------------------------------------------------

    def _judge(self, replica_id: ReplicaId, pace: Pace, now_ns: int) -> None:
        """Compare with the peers whatever is due for it."""
        due = pace.due(self._config, now_ns)
        if not any(due):
            return
        reason = judge(replica_id, pace, due, self._peers_now(now_ns), self._config)
        if reason is not None:
            self._eject_outlier(replica_id, reason, now_ns)

    def _take_step_models(self, step_model_of: Callable[[ReplicaId], StepCoefficients | None], now_ns: int) -> None:
        count = len(self._replicas)
        begin = self._turn % count if count > STEP_MODELS_AT_ONCE else 0
        some = list(islice(self._replicas.items(), begin, begin + STEP_MODELS_AT_ONCE))
        self._turn = begin + STEP_MODELS_AT_ONCE
        closed = [(r, replica.pace) for r, replica in some if replica.breaker.state is BreakerState.CLOSED]
        for replica_id, pace in closed:
            model = step_model_of(replica_id)
            if model is not None:
                pace.take_step_model(model, now_ns)
        for replica_id, pace in closed:
            self._judge(replica_id, pace, now_ns)

    def _typical(self, now_ns: int) -> float:
        return self._peers_now(now_ns).levels.median() or 0.0

    def _peers_now(self, now_ns: int) -> Peers:
        if self._peers is None or now_ns - self._peers_ns >= PEERS_NS:
            paces = [(r, x.pace) for r, x in self._replicas.items() if x.breaker.state is BreakerState.CLOSED]
            self._peers, self._peers_ns = peers_of(paces, self._config, now_ns), now_ns
        return self._peers

    def _probed(self, replica_id: ReplicaId, breaker: Breaker, residual: float | None, now_ns: int) -> None:
        """A replica that is not closed answered."""
        limit = math.log(self._config.grey_factor) if breaker.code == "grey_ttft" else math.inf
        if breaker.probing and residual is not None and residual - max(0.0, self._typical(now_ns)) > limit:
            self._eject(replica_id, _again(breaker), now_ns)
            return
        if breaker.passed(self._config, now_ns):
            del self._away[replica_id]
        self._refresh(now_ns)

    # --- leaving alone ------------------------------------------------------------------------------------------------

    def _eject_outlier(self, replica_id: ReplicaId, reason: Reason, now_ns: int) -> None:
        outliers = sum(b.code != FAILURES for b in self._away.values())
        if outliers < self._outliers_max and len(self._away) + 1 < len(self._replicas):
            self._eject(replica_id, reason, now_ns)

    @property
    def _outliers_max(self) -> int:
        return int(self._config.ejected_share_max * len(self._replicas))

    def _eject(self, replica_id: ReplicaId, reason: Reason, now_ns: int) -> None:
        replica = self._replicas.get(replica_id) or self._gone[replica_id]
        alone = len(self._away.keys() | {replica_id}) == len(self._replicas)
        replica.breaker.open(reason.code, reason.text, self._config, now_ns, self._rng, alone=alone)
        replica.pace.forget()
        if replica_id in self._replicas:
            self._away[replica_id] = replica.breaker
        self._ejections[reason.code] += 1
        self._peers = None
        self._balance(now_ns)

    def _balance(self, now_ns: int) -> None:
        """Take back those judged first while too many are left alone for being worse than their peers."""
        outliers = [r for r, b in self._away.items() if b.code != FAILURES]
        for replica_id in outliers:
            if len(outliers) <= self._outliers_max and len(self._away) < len(self._replicas):
                break
            self._away.pop(replica_id).close(now_ns)
            outliers = outliers[1:]
        self._refresh(now_ns)

    def _join(self, replica_id: ReplicaId, new_until_ns: int) -> None:
        replica = self._gone.pop(replica_id) if replica_id in self._gone else _Replica(new_until_ns)
        self._replicas[replica_id] = replica
        if replica.breaker.state is not BreakerState.CLOSED:
            self._away[replica_id] = replica.breaker

    def _leave(self, replica_id: ReplicaId) -> None:
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            replica.pace.waiting = None
            self._gone[replica_id] = replica
            if len(self._gone) > GONE_MAX:
                self._gone.popitem(last=False)
        self._away.pop(replica_id, None)
        self._blocked -= {replica_id}
        self._peers = None
        self._changes_ns = 0  # times are looked at again when somebody asks
        self._probe_ns = None

    def _refresh(self, now_ns: int) -> None:
        blocked = frozenset([r for r, b in self._away.items() if not b.takes(now_ns)])
        if blocked != self._blocked:
            self._blocked = blocked
        times = [t for b in self._away.values() if (t := b.changes_ns()) is not None]
        self._changes_ns = min(times, default=None)
        probes = [t for b in self._away.values() if (t := b.probe_due_ns()) is not None]
        self._probe_ns = min(probes, default=None)


def with_probe(choice: RouteChoice, replica_id: ReplicaId) -> RouteChoice:
    """``choice`` with ``replica_id`` before all others."""
    text = f"{replica_id} is on probation and due for a request; else: {choice.reason.text}"
    return choice.led_by(replica_id, Reason(PROBATION, text))


def _again(breaker: Breaker) -> Reason:
    return Reason(breaker.code, f"{breaker.text.removesuffix(_PROBE)}{_PROBE}")


def _one_less(pace: Pace) -> None:
    """One request fewer waits for its first byte."""
    if pace.waiting is not None:
        pace.waiting.requests -= 1
        if pace.waiting.requests <= 0:
            pace.waiting = None


def _state_of(replica: _Replica, config: FaultsConfig) -> ReplicaHealthState:
    breaker, pace = replica.breaker, replica.pace
    return ReplicaHealthState(
        breaker.state,
        breaker.code,
        breaker.text,
        breaker.failures,
        pace.failed_share,
        math.exp(pace.level) if pace.answers >= config.grey_samples_min else None,
        math.exp(pace.drift) if pace.drift is not None else None,
    )
