"""The replicas a gateway may route to: Serve's membership, each one's last sample with its age, and the gateway's own
load.

Serve hands over each member's last routing statistics again and again, and no clock travels with them. So a sample is
new when its ``seq`` differs from the one before, and its age is counted from this gateway's own receipt. A member
without statistics, or whose statistics have no ``seq``, is known by local counts alone.

Keys read are those of :mod:`policies.routing.sample`. A value that is missing, of the wrong type, negative or not
finite is unknown; other keys are ignored.

A replica that said it drains is unavailable for good. One that said it is stuck is unavailable while that sample is
fresh: after that nothing is known, and it is judged by local counts like any other silent replica (fail open). One that
the gateway blocks (:meth:`Fleet.block`) is unavailable until it does not any more.

Nothing is computed for replicas where nothing happened. The live router reads the :class:`Board` of standings, which
:meth:`Fleet.board` brings up to date: replicas whose local counts changed, and those whose sample grew too old. New
samples of a large fleet are put in their places :data:`SAMPLES_AT_ONCE` at an update and :data:`SAMPLES_PER_CHOICE` at
each choice, so that neither stalls the other work of a gateway. Until then such a replica keeps its old place among the
least loaded and in the mean; where it is looked at (:meth:`Fleet.standings`) its last sample counts. Other strategies
get :meth:`Fleet.views`.

A replica that has learned its speed from fewer than :data:`LEARNED_STEPS_MIN` steps is taken to be as fast as one that
has learned it, if there ever was one. By the configured prior, which knows nothing of the device, a new replica may
look so slow that it gets no request, and so never learns.

What this must not do: drop load or prefixes of removed members itself (their owners do, with what ``update`` returns).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

from policies.config import RoutingConfig
from policies.routing.board import Board
from policies.routing.load import LoadBook
from policies.routing.predict import CHUNK_TOKENS_GUESS, Standing, join, open_requests
from policies.routing.sample import COUNT_KEYS, STEP_KEYS
from policies.types import ReplicaId, ReplicaState, ReplicaView, StepCoefficients

Removed: TypeAlias = frozenset[ReplicaId]
"""Replicas that left: tell the load book and the router to forget them."""

COUNT_MAX = 2**53
"""Counts above this are nonsense."""

SAMPLES_AT_ONCE = 128
"""New samples that one update puts in their place on the board."""

SAMPLES_PER_CHOICE = 2
"""New samples, and in a large fleet changed counts, that one choice puts in their place on the board."""

LEARNED_STEPS_MIN = 16
"""Steps from which on a replica's own step model is believed before that of another."""

VIEW_NS = 100_000_000
"""Views are made anew after this time, so that the age in them is right to a tenth of a second."""

_TOLD = COUNT_KEYS + STEP_KEYS
_EJECTED = "is ejected"
_DRAINING, _STUCK = ReplicaState.DRAINING.value, ReplicaState.STUCK.value


class _Member:
    """One replica: its last sample, the local counts when that arrived, and what is cached of it."""

    __slots__ = (
        "at_sample", "blocked", "draining", "gone", "kv_tokens_max", "kv_tokens_used", "prefill_backlog_tokens",
        "received_ns", "replica_id", "requests", "running", "running_seqs_max", "seq", "state", "step_model",
        "step_samples", "step_tokens_max", "told", "unread", "view", "view_until_ns", "waiting", "watched",
    )  # fmt: skip

    def __init__(self, replica_id: ReplicaId) -> None:
        self.replica_id = replica_id
        self.seq: int | None = None
        """Of the last sample; ``None``: there was none."""
        self.received_ns = 0
        self.told: tuple[object, ...] = ()
        """The last sample as it came: values of the keys in ``_TOLD``."""
        self.step_samples: object = None
        self.unread = False
        """The last sample was not taken in yet."""
        self.at_sample = (0, 0, 0)
        self.running: int | None = None
        self.waiting: int | None = None
        self.requests: int | None = None
        """Running and waiting together."""
        self.prefill_backlog_tokens: int | None = None
        self.kv_tokens_used: int | None = None
        self.kv_tokens_max: int | None = None
        self.running_seqs_max: int | None = None
        self.step_tokens_max: int | None = None
        self.step_model: StepCoefficients | None = None
        self.state: object = None
        self.draining = False
        self.blocked = ""
        """Why this gateway sends it nothing; empty: it does."""
        self.gone = False
        self.watched = False
        """The sample's age is watched."""
        self.view: ReplicaView | None = None
        self.view_until_ns = 0

    def read(self) -> None:
        """Take in the last sample, if it was not yet."""
        if not self.unread:
            return
        self.unread = False
        told = self.told
        values = [v if type(v) is int and 0 <= v <= COUNT_MAX else _count(v) for v in told[:7]]
        self.running, self.waiting, self.prefill_backlog_tokens, self.kv_tokens_used = values[:4]
        self.kv_tokens_max, self.running_seqs_max, self.step_tokens_max = (
            values[4] or None,
            values[5] or None,
            values[6] or None,
        )
        self.requests = open_requests(self.running, self.waiting)
        self.step_model = _step_model(told[7:], self.step_samples) or self.step_model

    @property
    def learned(self) -> bool:
        """Whether its step model comes from enough steps."""
        return self.step_model is not None and self.step_model.samples >= LEARNED_STEPS_MIN

    def fresh(self, now_ns: int, age_ms_max: float) -> bool:
        """Whether the last sample counts."""
        return self.seq is not None and (now_ns - self.received_ns) / 1e6 <= age_ms_max

    def unavailable_reason(self, fresh: bool) -> str:
        """Why the replica takes no requests; empty: it does."""
        if self.draining:
            return "is draining"
        return "is stuck" if fresh and self.state == _STUCK else self.blocked


class Fleet:
    """Membership and samples, joined with the load book."""

    def __init__(self, config: RoutingConfig, book: LoadBook) -> None:
        self._config = config
        self._age_ms_max = config.sample_age_ms_max
        self._book = book
        self._members: dict[ReplicaId, _Member] = {}
        self._sorted: list[_Member] = []
        self._views_due: dict[ReplicaId, _Member] = {}
        self._blocked: frozenset[ReplicaId] = frozenset()
        self._board: Board | None = None
        self._due: dict[ReplicaId, _Member] = {}
        """Members whose standing changed."""
        self._late: OrderedDict[ReplicaId, _Member] = OrderedDict()
        """Members whose new sample, or in a large fleet new count, is not on the board yet; it never changes whether
        they are available."""
        self._watch: list[tuple[int, int, _Member]] = []
        """Heap of times at which samples may be too old, with a running number."""
        self._watched = 0
        self._peer: _Member | None = None
        self._typical: StepCoefficients | None = None
        """Speed that ``_peer`` had learned when it was last looked at."""

    def update(self, members: Mapping[ReplicaId, Mapping[str, object] | None], now_ns: int) -> Removed:
        """Take Serve's members with each one's last routing statistics; return those that left."""
        known = self._members
        removed = frozenset(known.keys() - members.keys())
        for replica_id in removed:
            self._remove(known.pop(replica_id))
        added: list[_Member] = []
        for replica_id, stats in members.items():
            member = known.get(replica_id)
            if member is None:
                member = known[replica_id] = _Member(replica_id)
                member.blocked = _EJECTED if replica_id in self._blocked else ""
                added.append(member)
            if stats is not None:
                self._receive(member, stats, now_ns)
        if added or removed:
            self._sorted = [known[r] for r in sorted(known)]
        self._learn_typical()
        if self._board is not None:
            if removed:
                self._board.ring.remove(removed)
            self._join(added)
            self._take_late(SAMPLES_AT_ONCE, now_ns)
        return removed

    def block(
        self, replica_ids: frozenset[ReplicaId], now_ns: int, reason: Callable[[ReplicaId], str] | None = None
    ) -> None:
        """Send nothing to ``replica_ids`` from now on, and to all others again. Costs what changed.

        ``reason`` says in words why one of them is left alone.
        """
        for replica_id in replica_ids ^ self._blocked:
            member = self._members.get(replica_id)
            if member is None:
                continue
            why = reason(replica_id) if reason is not None and replica_id in replica_ids else ""
            member.blocked = (f"{_EJECTED}: {why}" if why else _EJECTED) if replica_id in replica_ids else ""
            member.view = None
            if self._board is not None:
                self._place(self._board, member, now_ns)
        self._blocked = replica_ids

    @property
    def own_requests(self) -> int:
        """Open requests of this gateway."""
        return self._book.inflight

    def _learn_typical(self) -> None:
        """Keep one replica's learned speed for those that have learned none; anew when it left or knows far more."""
        peer, known = self._peer, self._typical
        if peer is None or peer.gone:
            peer = next((m for m in self._sorted if self._read(m).learned), None)
        model = self._read(peer).step_model if peer is not None else None
        if model is None or (peer is self._peer and known is not None and model.samples < 4 * known.samples):
            return
        self._peer, self._typical = peer, model
        changed = {m.replica_id: m for m in self._sorted if not m.learned}
        self._views_due.update(changed)
        if self._board is not None:
            self._due.update(changed)

    @staticmethod
    def _read(member: _Member) -> _Member:
        member.read()
        return member

    def _step_model_of(self, member: _Member) -> StepCoefficients | None:
        return member.step_model if member.learned else self._typical or member.step_model

    def stuck(self, now_ns: int) -> frozenset[ReplicaId]:
        """Members that say they have work and make no progress, while their sample is fresh."""
        age_ms_max = self._config.sample_age_ms_max
        return frozenset([m.replica_id for m in self._sorted if m.state == _STUCK and m.fresh(now_ns, age_ms_max)])

    def learned_step_model(self, replica_id: ReplicaId) -> StepCoefficients | None:
        """What the replica itself has learned of its speed, as last told; ``None``: unknown, or of too few steps."""
        member = self._members.get(replica_id)
        return None if member is None or not self._read(member).learned else member.step_model

    def takes(self, replica_id: ReplicaId, now_ns: int) -> bool:
        """Whether a replica takes requests, as far as it says itself and this gateway wants."""
        member = self._members.get(replica_id)
        return member is not None and not member.unavailable_reason(member.fresh(now_ns, self._age_ms_max))

    def all_leave(self) -> bool:
        """Whether every known replica drains, or none is known."""
        return all(m.draining for m in self._sorted)

    def members(self) -> tuple[ReplicaId, ...]:
        """Known replicas, sorted."""
        return tuple(m.replica_id for m in self._sorted)

    # --- views, for strategies that look at every replica -------------------------------------------------------------

    def views(self, now_ns: int, exclude: Collection[ReplicaId] = ()) -> list[ReplicaView]:
        """All members, sorted by id; those in ``exclude`` are unavailable, so that a choice can say why.

        Ages are at most :data:`VIEW_NS` behind, and never on the wrong side of ``sample_age_ms_max``.
        """
        self._drain()
        for member in self._views_due.values():
            member.view = None
        self._views_due.clear()
        return [
            m.view
            if m.view is not None and now_ns <= m.view_until_ns and m.replica_id not in exclude
            else self._view(m, now_ns, m.replica_id in exclude)
            for m in self._sorted
        ]

    def _view(self, member: _Member, now_ns: int, excluded: bool) -> ReplicaView:
        member.read()
        fresh = member.fresh(now_ns, self._config.sample_age_ms_max)
        why = member.unavailable_reason(fresh) or ("was tried already" if excluded else "")
        local = self._book.counts(member.replica_id)
        if member.seq is None:
            step_model = self._step_model_of(member)
            view = ReplicaView(
                member.replica_id, *local, step_model=step_model, available=not why, unavailable_reason=why
            )
        else:
            view = ReplicaView(
                member.replica_id,
                *local,
                (now_ns - member.received_ns) / 1e6,
                member.running,
                member.waiting,
                member.prefill_backlog_tokens,
                member.kv_tokens_used,
                member.kv_tokens_max,
                member.running_seqs_max,
                member.step_tokens_max,
                self._step_model_of(member),
                *member.at_sample,
                not why,
                why,
            )
        if not excluded:
            member.view = view
            member.view_until_ns = now_ns + VIEW_NS
            if fresh:
                old_ns = member.received_ns + int(self._config.sample_age_ms_max * 1e6)
                member.view_until_ns = min(member.view_until_ns, old_ns - 1)
        return view

    # --- the board, for the live router -------------------------------------------------------------------------------

    def board(self, now_ns: int) -> Board:
        """The standings of all available replicas, as current as the module says."""
        if self._board is None:
            self._board = Board()
            self._join(self._sorted)
        self._drain()
        while self._watch and self._watch[0][0] <= now_ns:
            self._check_age(heapq.heappop(self._watch)[2], now_ns)
        if self._due:
            due, self._due = self._due, {}
            for member in due.values():
                self._place(self._board, member, now_ns)
        self._take_late(SAMPLES_PER_CHOICE, now_ns)
        return self._board

    def standings(self, replica_ids: Iterable[ReplicaId], now_ns: int) -> dict[ReplicaId, Standing]:
        """Standings of some replicas of :meth:`board`, with their last samples; those that take no requests are left
        out.
        """
        board = self.board(now_ns) if self._board is None else self._board
        if self._late:
            for replica_id in replica_ids:
                if replica_id in self._late:
                    self._place(board, self._late[replica_id], now_ns)
        known = board.standings
        return {r: known[r] for r in replica_ids if r in known}

    def _join(self, added: Collection[_Member]) -> None:
        if self._board is not None and added:
            self._board.ring.add([m.replica_id for m in added])
            self._due.update((m.replica_id, m) for m in added)

    def _remove(self, member: _Member) -> None:
        member.gone = True
        for waiting in (self._views_due, self._due, self._late):
            waiting.pop(member.replica_id, None)
        if self._board is not None:
            self._board.put(member.replica_id, None)

    def _receive(self, member: _Member, stats: Mapping[str, object], now_ns: int) -> None:
        """Keep a sample with the local counts of this moment; it is read when somebody looks."""
        if type(stats) is not dict and not isinstance(stats, Mapping):
            return
        seq = stats.get("seq")
        if type(seq) is not int or not 0 <= seq <= COUNT_MAX:
            seq = _count(seq)
        if seq is None or seq == member.seq:
            return
        told = tuple(map(stats.get, _TOLD))
        same = told == member.told
        if member.unread and not same and not _tells_step_model(told[7:]):
            member.read()
        replica_id = member.replica_id
        counts = self._book.counts(replica_id)
        state = stats.get("state")
        if self._board is not None:
            if state != member.state or state == _STUCK:
                self._due[replica_id] = member
            elif not same or counts != member.at_sample or not member.watched:
                self._late[replica_id] = member
        member.seq, member.received_ns, member.told, member.unread = seq, now_ns, told, True
        member.at_sample, member.step_samples = counts, stats.get("step_samples")
        member.view = None
        member.state = state
        if state == _DRAINING:
            member.draining = True

    def _drain(self) -> None:
        """Note whose local counts changed."""
        few = len(self._members) <= SAMPLES_AT_ONCE
        for replica_id in self._book.take_changed():
            member = self._members.get(replica_id)
            if member is not None:
                self._views_due[replica_id] = member
                if self._board is not None:
                    (self._due if few else self._late)[replica_id] = member

    def _take_late(self, count: int, now_ns: int) -> None:
        if self._board is None or not self._late:
            return
        for _ in range(min(count, len(self._late))):
            self._place(self._board, self._late.popitem(last=False)[1], now_ns)

    def _check_age(self, member: _Member, now_ns: int) -> None:
        """Look at a member whose sample may be too old; one whose sample is not is looked at again when it may be."""
        if member.gone:
            return
        if member.fresh(now_ns, self._config.sample_age_ms_max):
            self._watch_age(member, now_ns)
        else:
            member.watched = False
            self._due[member.replica_id] = member

    def _watch_age(self, member: _Member, now_ns: int) -> None:
        member.watched = True
        self._watched += 1
        old_ns = member.received_ns + int(self._config.sample_age_ms_max * 1e6)
        heapq.heappush(self._watch, (max(old_ns, now_ns) + 1, self._watched, member))

    def _place(self, board: Board, member: _Member, now_ns: int) -> None:
        """Compute a member's standing and put it on the board."""
        if member.unread:
            member.read()
        replica_id = member.replica_id
        self._late.pop(replica_id, None)
        requests, prefill_tokens, kv_tokens = self._book.counts(replica_id)
        fresh = member.fresh(now_ns, self._age_ms_max)
        if fresh:
            if not member.watched:
                self._watch_age(member, now_ns)
            at_requests, at_prefill_tokens, at_kv_tokens = member.at_sample
            requests = join(requests, member.requests, at_requests)
            prefill_tokens = join(prefill_tokens, member.prefill_backlog_tokens, at_prefill_tokens)
            kv_tokens = join(kv_tokens, member.kv_tokens_used, at_kv_tokens)
        standing = None
        if not member.unavailable_reason(fresh):
            standing = Standing(
                requests,
                prefill_tokens,
                kv_tokens,
                member.running_seqs_max,
                member.kv_tokens_max,
                member.step_tokens_max or CHUNK_TOKENS_GUESS,
                self._step_model_of(member) or self._config.step_prior,
            )
        board.put(replica_id, standing)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if 0 <= value <= COUNT_MAX else None


def _count(value: object) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _tells_step_model(step: Sequence[object]) -> bool:
    """Whether a sample surely has a step model, so that nothing is lost with an unread one before it."""
    return any(step) and all(type(v) is float and 0 <= v <= COUNT_MAX for v in step)


def _step_model(step: Sequence[object], samples: object) -> StepCoefficients | None:
    """The replica's step model; ``None`` unless all four coefficients make sense and a step takes time."""
    a, b, c, d = [v if type(v) is float and 0 <= v <= COUNT_MAX else _number(v) for v in step]
    if a is None or b is None or c is None or d is None or not (a or b or c or d):
        return None
    return StepCoefficients(a, b, c, d, _count(samples) or 0)
