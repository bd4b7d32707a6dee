"""Which replica leaves because its device became slow: Serve starts another one in its place.

    slow        by the fleet model: not even one sequence keeps the gap objective there, while others keep it
    became so   it kept the pace for :data:`KEPT_S` before: one that never did is of another kind, and so would be
                the one in its place
    leaves      once it was slow for :data:`AFTER_S`, nobody else is leaving or starting, and fewer than
                :data:`RETIRED_MAX` left within :data:`WINDOW_S`

The number of replicas that is asked for stays: what leaves carries nothing that counts, so its replacement costs
nothing while it starts, and a second one beside it would be paid for as long as the slow one stays. It cannot be sold
after its replacement came either: Serve stops the newest replicas first where the number falls, and offers no choice
(Ray 2.60, ``serve/_private/deployment_scheduler.py``). What Serve does offer is health: a replica whose check fails is
stopped gracefully and replaced (``deployment_state.py``, ``check_and_update_replicas``). So a replica that is named
here tells routers that it drains, and fails its health checks (``deployments/replica_host.py``).

A slow replica that may not leave is bought for beside (``joint.py``).

What this must not do: judge who is slow, or act.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from policies.control.moves import Move, Place, Value, Wishes
from policies.control.signals import Signals
from policies.steering import Alternative, Knob, Lever
from policies.types import Reason, ReplicaId

KEPT_S = 60.0
"""Time for which a replica must have kept the pace before it became slow."""

AFTER_S = 5.0
"""Time for which it must have been slow."""

RETIRED_MAX = 3
"""Replicas that leave within :data:`WINDOW_S`; where more become slow, their devices are not the reason."""

WINDOW_S = 3_600.0

GIVE_UP_S = 300.0
"""A replica that is still there after this time is not retired any more: Serve does not follow."""


class Retirement:
    """The rule with its memory, bounded by the replicas that report."""

    def __init__(self) -> None:
        self._quick_ns: dict[ReplicaId, int] = {}
        """When each replica was first seen to keep the pace."""
        self._slow_ns: dict[ReplicaId, int] = {}
        """Since when those that are slow are."""
        self._retired_ns: dict[ReplicaId, int] = {}
        """Those that were told to leave and are still there, and when."""
        self._refused: set[ReplicaId] = set()
        """Those that must not leave, by somebody's word or because Serve did not follow."""
        self._past_ns: deque[int] = deque(maxlen=RETIRED_MAX)
        self._next: ReplicaId | None = None

    @property
    def wishes(self) -> Wishes:
        """1 for those that leave, 0 for those that are slow and stay; nobody else has a place."""
        places: dict[Place, Value] = {(Knob.RETIRED, r): 0 for r in self._slow_ns}
        places.update({(Knob.RETIRED, r): 1 for r in self._retired_ns})
        return places

    @property
    def replaced(self) -> frozenset[ReplicaId]:
        """Slow replicas that leave, or will within seconds: nothing needs to be bought for them."""
        return frozenset(self._retired_ns) if self._next is None else frozenset({self._next, *self._retired_ns})

    def step(
        self, signals: Signals, quick: Sequence[ReplicaId], slow: Iterable[ReplicaId], figures: Mapping[str, float],
        now_ns: int,
    ) -> list[Move]:  # fmt: skip
        """At most one that leaves, and those that are given up.

        Args:
            signals: what is known of the fleet.
            quick: replicas whose speed is known and keeps the pace.
            slow: those that cannot.
            figures: predicted of the fleet once all are quick again.
            now_ns: the tick's time.
        """
        self._look(signals, quick, slow, now_ns)
        moves = [self._give_up(r) for r, at_ns in self._retired_ns.items() if now_ns - at_ns > GIVE_UP_S * 1e9]
        for move in moves:
            self._retired_ns.pop(move.target)
        self._next = None
        if self._retired_ns or signals.blind or not _whole(signals) or self._many(now_ns):
            return moves
        self._next = min((r for r in self._slow_ns if self._became(r)), key=self._slow_ns.__getitem__, default=None)
        if self._next is None or now_ns - self._slow_ns[self._next] < AFTER_S * 1e9:
            return moves
        return [*moves, self._retire(self._next, figures, now_ns)]

    def adopt(self, in_force: Wishes) -> None:
        """Told what stands: who may not leave stays, and is not asked again."""
        kept = [r for r in self._retired_ns if not in_force.get((Knob.RETIRED, r), 1)]
        for replica_id in kept:
            del self._retired_ns[replica_id]
            self._refused.add(replica_id)

    def _look(self, signals: Signals, quick: Sequence[ReplicaId], slow: Iterable[ReplicaId], now_ns: int) -> None:
        known = set(signals.ids)
        for replica_id in quick:
            self._quick_ns.setdefault(replica_id, now_ns)
        if self._slow_ns:
            for replica_id in quick:
                self._slow_ns.pop(replica_id, None)
        for replica_id in slow:
            self._slow_ns.setdefault(replica_id, now_ns)
        for book in (self._quick_ns, self._slow_ns, self._retired_ns):
            for replica_id in () if book.keys() <= known else book.keys() - known:
                del book[replica_id]
        self._refused &= known

    def _became(self, replica_id: ReplicaId) -> bool:
        quick_ns = self._quick_ns.get(replica_id)
        kept = quick_ns is not None and self._slow_ns[replica_id] - quick_ns >= KEPT_S * 1e9
        return kept and replica_id not in self._refused

    def _many(self, now_ns: int) -> bool:
        return len(self._past_ns) == RETIRED_MAX and now_ns - self._past_ns[0] < WINDOW_S * 1e9

    def _retire(self, replica_id: ReplicaId, figures: Mapping[str, float], now_ns: int) -> Move:
        self._retired_ns[replica_id] = now_ns
        self._past_ns.append(now_ns)
        self._next = None
        slow_s = (now_ns - self._slow_ns[replica_id]) / 1e9
        text = f"not even one sequence keeps the pace here for {slow_s:.0f} s, others keep it: Serve starts another one"
        beside = Alternative(
            Lever.REPLICAS.value,
            "one more replica",
            {},
            "the slow one would stay and be paid for",
        )
        place = (Knob.RETIRED, replica_id)
        return Move(
            Lever.REPLICAS, replica_id, {place: 0}, {place: 1}, Reason("Retired", text), {"slow_s": round(slow_s, 1)},
            figures, frozenset({"grey_failure"}), urgent=True, alternatives=(beside,),
        )  # fmt: skip

    def _give_up(self, replica_id: ReplicaId) -> Move:
        self._refused.add(replica_id)
        place = (Knob.RETIRED, replica_id)
        text = f"it is still there after {GIVE_UP_S:.0f} s: it may stay"
        return Move(Lever.REPLICAS, replica_id, {place: 1}, {place: 0}, Reason("NotReplaced", text), urgent=True)


def _whole(signals: Signals) -> bool:
    """Whether as many run as are asked for, and more than one."""
    fleet = signals.fleet
    return fleet is not None and fleet.replicas_running >= max(2, fleet.replicas_target)
