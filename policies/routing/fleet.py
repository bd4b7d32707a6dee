"""The replicas a gateway may route to: Serve's membership, each one's last sample with its age, and the gateway's own
load.

Serve hands over each member's last routing statistics again and again, and no clock travels with them. So a sample is
new when its ``seq`` differs from the one before, and its age is counted from this gateway's own receipt. A member
without statistics, or whose statistics have no ``seq``, is known by local counts alone.

Keys read: ``seq``, ``running``, ``waiting``, ``prefill_backlog_tokens``, ``kv_tokens_used``, ``kv_tokens_max``,
``running_seqs_max``, ``step_tokens_max``, ``step_{a,b,c,d}_ms``, ``step_samples``, ``state``. A value that is
missing, of the wrong type, negative or not finite is unknown; other keys are ignored.

A replica that said it drains is unavailable for good. One that said it is stuck is unavailable while that sample is
fresh: after that nothing is known, and it is judged by local counts like any other silent replica (fail open).

What this must not do: drop load or prefixes of removed members itself (their owners do, with what ``update`` returns).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from policies.config import RoutingConfig
from policies.routing.load import LoadBook
from policies.types import ReplicaId, ReplicaState, ReplicaView, Sampled, StepCoefficients

Removed: TypeAlias = frozenset[ReplicaId]
"""Replicas that left: tell the load book and the router to forget them."""

COUNT_MAX = 2**53
"""Counts above this are nonsense."""


@dataclass(frozen=True, slots=True)
class _Sample:
    seq: int
    running: int | None
    waiting: int | None
    prefill_backlog_tokens: int | None
    kv_tokens_used: int | None
    kv_tokens_max: int | None
    running_seqs_max: int | None
    step_tokens_max: int | None
    state: str | None
    local_requests: int
    local_prefill_tokens: int
    local_decode_tokens: int


@dataclass(slots=True)
class _Member:
    sample: Sampled[_Sample] | None = None
    step_model: StepCoefficients | None = None
    draining: bool = False


class Fleet:
    """Membership and samples; :meth:`views` joins them with the load book for the router."""

    def __init__(self, config: RoutingConfig, book: LoadBook) -> None:
        self._config = config
        self._book = book
        self._members: dict[ReplicaId, _Member] = {}

    def update(self, members: Mapping[ReplicaId, Mapping[str, object] | None], now_ns: int) -> Removed:
        """Take Serve's members with each one's last routing statistics; return those that left."""
        removed = frozenset(self._members.keys() - members.keys())
        for replica_id in removed:
            del self._members[replica_id]
        for replica_id, stats in members.items():
            member = self._members.setdefault(replica_id, _Member())
            if isinstance(stats, Mapping):
                self._receive(replica_id, member, stats, now_ns)
        return removed

    def members(self) -> tuple[ReplicaId, ...]:
        """Known replicas, sorted."""
        return tuple(sorted(self._members))

    def views(self, now_ns: int, exclude: Collection[ReplicaId] = ()) -> list[ReplicaView]:
        """All members, sorted by id; those in ``exclude`` are unavailable, so that a choice can say why."""
        return [self._view(r, self._members[r], now_ns, r in exclude) for r in sorted(self._members)]

    def _receive(self, replica_id: ReplicaId, member: _Member, stats: Mapping[str, object], now_ns: int) -> None:
        seq = _count(stats, "seq")
        if seq is None or (member.sample is not None and member.sample.value.seq == seq):
            return
        state = stats.get("state")
        book = self._book
        sample = _Sample(
            seq=seq,
            running=_count(stats, "running"),
            waiting=_count(stats, "waiting"),
            prefill_backlog_tokens=_count(stats, "prefill_backlog_tokens"),
            kv_tokens_used=_count(stats, "kv_tokens_used"),
            kv_tokens_max=_count(stats, "kv_tokens_max") or None,
            running_seqs_max=_count(stats, "running_seqs_max") or None,
            step_tokens_max=_count(stats, "step_tokens_max") or None,
            state=state if isinstance(state, str) else None,
            local_requests=book.requests(replica_id),
            local_prefill_tokens=book.prefill_tokens(replica_id),
            local_decode_tokens=book.decode_tokens(replica_id),
        )
        member.sample = Sampled(sample, now_ns)
        member.draining = member.draining or state == ReplicaState.DRAINING
        member.step_model = _step_model(stats) or member.step_model

    def _view(self, replica_id: ReplicaId, member: _Member, now_ns: int, excluded: bool) -> ReplicaView:
        book = self._book
        local = book.requests(replica_id), book.prefill_tokens(replica_id), book.decode_tokens(replica_id)
        if member.sample is None:
            why = "was tried already" if excluded else ""
            return ReplicaView(replica_id, *local, available=not excluded, unavailable_reason=why)
        s = member.sample.value
        age_ms = member.sample.age_ms(now_ns)
        why = self._unavailable_reason(member, s, age_ms, excluded)
        return ReplicaView(
            replica_id,
            *local,
            sample_age_ms=age_ms,
            sample_running=s.running,
            sample_waiting=s.waiting,
            sample_prefill_backlog_tokens=s.prefill_backlog_tokens,
            sample_kv_tokens_used=s.kv_tokens_used,
            sample_kv_tokens_max=s.kv_tokens_max,
            running_seqs_max=s.running_seqs_max,
            step_tokens_max=s.step_tokens_max,
            step_model=member.step_model,
            local_requests_at_sample=s.local_requests,
            local_prefill_tokens_at_sample=s.local_prefill_tokens,
            local_decode_tokens_at_sample=s.local_decode_tokens,
            available=not why,
            unavailable_reason=why,
        )

    def _unavailable_reason(self, member: _Member, sample: _Sample, age_ms: float, excluded: bool) -> str:
        if member.draining:
            return "is draining"
        if sample.state == ReplicaState.STUCK and age_ms <= self._config.sample_age_ms_max:
            return "is stuck"
        return "was tried already" if excluded else ""


def _number(stats: Mapping[str, object], key: str) -> float | None:
    value = stats.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if 0 <= value <= COUNT_MAX else None


def _count(stats: Mapping[str, object], key: str) -> int | None:
    value = _number(stats, key)
    return None if value is None else int(value)


def _step_model(stats: Mapping[str, object]) -> StepCoefficients | None:
    """The replica's step model; ``None`` unless all four coefficients make sense and a step takes time."""
    a, b, c, d = (_number(stats, f"step_{name}_ms") for name in "abcd")
    if a is None or b is None or c is None or d is None or not math.fsum((a, b, c, d)):
        return None
    return StepCoefficients(a, b, c, d, _count(stats, "step_samples") or 0)
