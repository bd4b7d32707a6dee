"""Sense, the replicas' half: what each replica's window of reports adds up to, and what they come to together.

Replicas report all through the second and a tick comes once, so what one report changes is worked out when it comes:
the replica's own figures for the tick that is expected, its place in the columns that a tick sums, and the sums of all
windows, which are whole numbers and so stay exact. At the tick only those are looked at again whose window is another
one by then, who have not reported since the tick before, or who fall silent.

This module decides nothing. It must not read a clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import add, sub
from typing import Any, NamedTuple, TypeAlias, TypeVar

from policies.config import ControlConfig
from policies.control.windows import Ahead, Figures, Reporter, Reporters, whole_ns
from policies.roofline import Load, Utilisation, utilisation
from policies.types import FleetView, Histogram, ReplicaId, ReplicaReport, ReplicaState, Sampled

T = TypeVar("T")

STEPS_MIN = 3
BUSY_MS_MIN = 250.0
"""Steps, and time in them, that a window must hold before its pace is compared."""

LEARNED_STEPS_MIN = 20
"""Steps a model must have seen before anything is read from it."""

Pace: TypeAlias = tuple[float, int, int, int, float]
"""Time in steps (ms), steps, KV tokens held, token gaps and prompt tokens of a window."""


@dataclass(slots=True)
class ReplicaSignals:
    """One replica: its last report, its age, and what its window of reports adds up to.

    To be read only; not frozen, because making a thousand of them at each tick would take five times as long.
    """

    latest: ReplicaReport
    age_ms: float
    fresh: bool
    window: tuple[Sampled[ReplicaReport], ...]
    """Oldest first; empty when the last report is older than the window."""
    window_ms: float
    """Time covered by the window's reports."""
    prefill_tps: float
    """Prompt tokens computed per second."""
    decode_tps: float
    """Tokens decoded per second."""
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    steps: int
    busy_share: float | None
    confidence: float
    """In [0, 1]: how recent, complete and long its window is; 0 where it is not fresh."""
    gaps: int
    """Token gaps in the window: the count of :attr:`itl`."""
    sums: list[int]
    """Of the window, in the order of :func:`_replica_figures`; nobody changes them."""
    itl_ns: int
    """Sum of the gaps, in ns."""
    prefill_share: float | None
    """Share of its step time that computes prompts; ``None`` while it makes no step or has no step model."""
    pace: Pace | None
    """What its pace is read from; ``None`` where it did too little."""
    _itl: Histogram | None = field(default=None, repr=False, compare=False)
    _utilisation: tuple[Utilisation | None] | None = field(default=None, repr=False, compare=False)

    @property
    def itl(self) -> Histogram:
        """Token gaps of the window. Put together when first asked for."""
        if self._itl is None:
            self._itl = Histogram(tuple(self.sums[_BUCKETS_AT:]), self.itl_ns / 1e6) if self.sums else _NO_GAPS
        return self._itl

    @property
    def utilisation(self) -> Utilisation | None:
        """What its device does of what it could, over the window's busy time; ``None`` while it does nothing or nothing
        is known. Worked out when first asked for.
        """
        if self._utilisation is None:
            self._utilisation = (_utilisation_of(self),)
        return self._utilisation[0]

    @property
    def replica_id(self) -> ReplicaId:
        """Serve's unique id."""
        return self.latest.replica_id

    @property
    def serving(self) -> bool:
        """Fresh and in the state that takes requests."""
        return self.fresh and self.latest.state is ReplicaState.READY


@dataclass(frozen=True, slots=True)
class Work:
    """What the fresh replicas did and hold, summed."""

    running: int
    waiting: int
    http_inflight: int
    prefill_tps: float
    decode_tps: float
    kv_tokens_used: int
    kv_tokens_max: int
    kv_share_max: float | None
    """Fullest replica's share of its KV cache."""
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    itl: Histogram
    busy_share: float | None
    """Mean over the fresh replicas that said."""
    gpu_utilisation_share: float | None
    """Mean over the fresh replicas with a GPU; never filled from the busy share."""
    confidence: float = 0.0
    """In [0, 1]: of all replicas that run as far as is known, silent ones counting as 0."""
    age_ms: float = 0.0
    """Of the oldest report that counts."""

    @property
    def kv_share(self) -> float | None:
        """Share of all KV cache in use; ``None`` where no replica has told its size."""
        return self.kv_tokens_used / self.kv_tokens_max if self.kv_tokens_max else None

    @property
    def prefix_hit_share(self) -> float | None:
        """Share of looked-up prompt tokens found in prefix caches; ``None`` without any."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else None


_NO_GAPS = Histogram()
_BUCKETS_AT = 7
"""Place of the first bucket among a replica's counts."""
_NO_SUMS = (0,) * (_BUCKETS_AT + len(Histogram().counts))
_NO_TIMES = (0,) * 4


def _replica_figures(report: ReplicaReport) -> Figures:
    """Counts: six of tokens, preemptions and steps, that of gaps, then the buckets of the histogram. Times: the window,
    the sum of the histogram, and busy time with the window it was measured in (0 and 0 where it was not).
    """
    buckets = report.itl.counts
    counts = (
        report.prefill_tokens,
        report.decode_tokens,
        report.prefix_query_tokens,
        report.prefix_hit_tokens,
        report.preemptions,
        report.steps,
        sum(buckets),
        *buckets,
    )
    window_ns, itl_ns, share = whole_ns(report.window_ms), whole_ns(report.itl.sum_ms), report.busy_share
    if share is None or not math.isfinite(share):
        return counts, (window_ns, itl_ns, 0, 0)
    return counts, (window_ns, itl_ns, round(share * window_ns), window_ns)


def _replica_signals(
    reporter: Reporter[ReplicaReport], ahead: Ahead[ReplicaReport], now_ns: int, age_ms_max: float
) -> ReplicaSignals:
    """A replica at ``now_ns``, at which ``ahead`` is its window."""
    window, sums = ahead.window, ahead.sums
    window_ns, itl_ns, busy_ns, busy_window_ns = ahead.times or _NO_TIMES
    window_ms = window_ns / 1e6
    seconds = window_ns / 1e9 or 1.0
    counts = (sums or _NO_SUMS)[:_BUCKETS_AT]
    prefill_tokens, decode_tokens, query_tokens, hit_tokens, preemptions, steps, gaps = counts
    last = reporter.last
    age_ms = (now_ns - last.received_ns) / 1e6
    latest, prefill_tps = last.value, prefill_tokens / seconds
    busy_share = busy_ns / busy_window_ns if busy_window_ns else None
    prefill_share = pace = None
    if busy_share:
        model = latest.step_model
        if model is not None and model.samples >= LEARNED_STEPS_MIN:
            prefill_share = min(1.0, model.d_ms * prefill_tps / 1000 / busy_share)
        busy_ms = busy_share * window_ms
        if busy_ms >= BUSY_MS_MIN and steps >= STEPS_MIN:
            pace = busy_ms, steps, latest.kv_tokens_used, gaps, prefill_tps * window_ms / 1000
    return ReplicaSignals(
        latest,
        age_ms,
        age_ms <= age_ms_max,
        window,
        window_ms,
        prefill_tps,
        decode_tokens / seconds,
        query_tokens,
        hit_tokens,
        preemptions,
        steps,
        busy_share,
        reporter.confidence(window[0] if window else None, now_ns, window_ms, age_ms_max),
        gaps,
        sums,
        itl_ns,
        prefill_share,
        pace,
    )


def _utilisation_of(replica: ReplicaSignals) -> Utilisation | None:
    latest, busy_share, steps = replica.latest, replica.busy_share, replica.steps
    if not busy_share or not steps:
        return None
    seconds = replica.window_ms / 1e3
    load = Load(
        tokens=(replica.prefill_tps + replica.decode_tps) * seconds,
        prefill_tokens=replica.prefill_tps * seconds,
        steps=steps,
        running=replica.decode_tps * seconds / steps,
        kv_tokens=_mean_kv_tokens(replica),
        busy_s=busy_share * seconds,
        busy_share=busy_share,
    )
    return utilisation(load, latest.roofline, latest.step_model, latest.gpu)


def _mean_kv_tokens(replica: ReplicaSignals) -> float:
    """Held at the ends of reports, weighed by the steps that each of them tells of."""
    reports = [sampled.value for sampled in replica.window]
    steps = sum([r.steps for r in reports])
    return sum([r.kv_tokens_used * r.steps for r in reports]) / steps if steps > 0 else replica.latest.kv_tokens_used


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


(
    _RUNNING, _WAITING, _HTTP_INFLIGHT, _KV_USED, _KV_MAX, _KV_SHARE, _PREFILL_TPS, _DECODE_TPS, _ITL_MS, _BUSY, _GPU,
    _CONFIDENCE, _PREEMPTED, _STATE, _MODEL,
) = range(15)  # fmt: skip
"""Columns."""


def _row(signals: ReplicaSignals) -> tuple[Any, ...]:
    """What a tick sums or counts of one replica, in the order of the columns."""
    latest = signals.latest
    kv_used, kv_max = latest.kv_tokens_used, latest.kv_tokens_max
    return (
        latest.running,
        latest.waiting,
        latest.http_inflight,
        kv_used,
        kv_max,
        kv_used / kv_max if kv_max > 0 else None,
        signals.prefill_tps,
        signals.decode_tps,
        signals.itl_ns / 1e6,
        signals.busy_share,
        latest.gpu_utilisation_share,
        signals.confidence,
        latest.preemptions,
        latest.state,
        latest.model,
    )


def _sums(replicas: Iterable[ReplicaSignals]) -> list[int]:
    """Of their windows."""
    return list(map(sum, zip(*[r.sums for r in replicas if r.sums], strict=True))) or list(_NO_SUMS)


class _Made(NamedTuple):
    """One replica's figures, and between which times they hold, but for its age."""

    signals: ReplicaSignals
    received_ns: int
    from_ns: int
    until_ns: int


class ReplicaBook:
    """The windows of all replicas, and their figures side by side in the order of their ids."""

    def __init__(self, replicas_max: int, config: ControlConfig) -> None:
        self._config = config
        self._reporters: Reporters[ReplicaReport] = Reporters(replicas_max, config, _replica_figures)
        self._order: list[Reporter[ReplicaReport]] = []
        """Whom the figures are of, in their order."""
        self.ids: tuple[ReplicaId, ...] = ()
        """Their names."""
        self._places: dict[ReplicaId, int] = {}
        self._newcomers: dict[ReplicaId, _Made] = {}
        """Figures of those that have no place yet."""
        self._made: list[ReplicaSignals] = []
        self._from_ns: list[int] = []
        self._until_ns: list[int] = []
        """Between these times :attr:`_made` holds, but for the age."""
        self._received_ns: list[int] = []
        self._told = bytearray()
        """1 for those that have reported since the last tick."""
        self._columns: list[list[Any]] = []
        """Figures of :func:`_row`, each of all replicas."""
        self._sums: list[int] = []
        """Of all windows."""
        self._now_ns = 0
        self._silent: list[int] = []
        """Places of those that are not fresh."""

    @property
    def refused(self) -> int:
        """Reports refused because there were too many replicas."""
        return self._reporters.refused

    def receive(self, report: ReplicaReport, now_ns: int, then_ns: int) -> bool:
        """Keep a report, and make its replica's figures ready for a tick at ``then_ns``; ``False``: it was ignored."""
        reporter = self._reporters.receive(report.replica_id, report, now_ns)
        if reporter is None:
            return False
        made = self._make(reporter, now_ns, max(now_ns, then_ns))
        place = self._places.get(report.replica_id)
        if place is None:
            self._newcomers[report.replica_id] = made
        else:
            self._put(place, made)
        return True

    def _make(self, reporter: Reporter[ReplicaReport], now_ns: int, then_ns: int) -> _Made:
        """A replica's figures at ``now_ns`` with its window at ``then_ns``, and between which times both stay."""
        age_ms_max, ahead, last = self._config.report_age_ms_max, reporter.ahead(then_ns), reporter.last
        fades_ms = min(2 * last.value.window_ms, age_ms_max)
        until_ns = min(ahead.until_ns, last.received_ns + math.floor(fades_ms * 1e6) - 1)
        signals = _replica_signals(reporter, ahead, now_ns, age_ms_max)
        return _Made(signals, last.received_ns, ahead.from_ns, until_ns)

    def _put(self, place: int, made: _Made) -> None:
        before, signals = self._made[place].sums, made.signals
        self._sums = list(map(add, self._sums, map(sub, signals.sums or _NO_SUMS, before or _NO_SUMS)))
        self._told[place] = 1
        self._made[place], self._received_ns[place] = signals, made.received_ns
        self._from_ns[place], self._until_ns[place] = made.from_ns, made.until_ns
        for column, value in zip(self._columns, _row(signals), strict=True):
            column[place] = value

    def look(self, now_ns: int) -> tuple[ReplicaSignals, ...]:
        """Every known replica at ``now_ns``, those silent for too long forgotten; what follows is of this time."""
        self._now_ns = now_ns
        oldest_ns = min(self._received_ns, default=now_ns)
        if self._newcomers or (now_ns - oldest_ns) / 1e6 > self._config.forget_after_ms:
            self._reporters.forget(now_ns)
        if self._reporters.items() is not self._order:
            self._arrange(now_ns)
        if not self._order:
            return ()
        told, self._told = self._told, bytearray(len(self._order))
        if 0 in told or max(self._from_ns) > now_ns or min(self._until_ns) < now_ns:
            for place, (from_ns, until_ns) in enumerate(zip(self._from_ns, self._until_ns, strict=True)):
                if not told[place] or not from_ns <= now_ns <= until_ns:
                    self._put(place, self._anew(self._order[place], now_ns))
            self._told = bytearray(len(self._order))
        for signals, at_ns in zip(self._made, self._received_ns, strict=True):
            signals.age_ms = (now_ns - at_ns) / 1e6
        silent = (now_ns - min(self._received_ns)) / 1e6 > self._config.report_age_ms_max
        self._silent = [place for place, signals in enumerate(self._made) if not signals.fresh] if silent else []
        return tuple(self._made)

    def _anew(self, reporter: Reporter[ReplicaReport], now_ns: int) -> _Made:
        reporter.window(now_ns)
        return self._make(reporter, now_ns, now_ns)

    def _arrange(self, now_ns: int) -> None:
        """Other replicas are known than before."""
        known = self._newcomers
        for name, place in self._places.items():
            if self._told[place]:
                at_ns, from_ns, until_ns = self._received_ns[place], self._from_ns[place], self._until_ns[place]
                known.setdefault(name, _Made(self._made[place], at_ns, from_ns, until_ns))
        self._order, self._newcomers = self._reporters.items(), {}
        self.ids = tuple([reporter.name for reporter in self._order])
        self._places = {name: place for place, name in enumerate(self.ids)}
        rows = [known.get(r.name) or self._anew(r, now_ns) for r in self._order]
        self._made, self._received_ns = [m.signals for m in rows], [m.received_ns for m in rows]
        self._from_ns, self._until_ns = [m.from_ns for m in rows], [m.until_ns for m in rows]
        self._told = bytearray([1]) * len(rows)
        self._columns = [list(column) for column in zip(*map(_row, self._made), strict=True)]
        self._sums = _sums(self._made)

    # --- what they come to --------------------------------------------------------------------------------------------

    def models(self) -> set[str]:
        """Models of all known replicas."""
        return set(self._columns[_MODEL]) if self._order else set()

    def preempting(self) -> tuple[int, ...]:
        """Places of those whose last report tells of preemptions."""
        counts = self._columns[_PREEMPTED] if self._order else []
        return tuple([place for place, count in enumerate(counts) if count]) if any(counts) else ()

    @property
    def all_fresh(self) -> bool:
        """Whether all of them are fresh."""
        return not self._silent

    @property
    def all_serving(self) -> bool:
        """Whether all of them are fresh and take requests."""
        return not self._silent and (not self._order or {*self._columns[_STATE]} == {ReplicaState.READY})

    def work(self, unknown: int, model: str | None = None) -> Work | None:
        """What the fresh ones (of ``model``) come to, where ``unknown`` more run and say nothing; ``None``: none is."""
        places = self._fresh_places(model)
        number = len(self._order) if places is None else len(places)
        if not number:
            return None

        def chosen(values: list[T]) -> list[T]:
            return values if places is None else [values[place] for place in places]

        def column(name: int) -> list[Any]:
            return chosen(self._columns[name])

        sums = self._sums if places is None else _sums([self._made[place] for place in places])
        _, _, query_tokens, hit_tokens, preemptions, _, gaps = sums[:_BUCKETS_AT]
        itl_ms = sum(column(_ITL_MS))
        return Work(
            running=sum(column(_RUNNING)),
            waiting=sum(column(_WAITING)),
            http_inflight=sum(column(_HTTP_INFLIGHT)),
            prefill_tps=sum(column(_PREFILL_TPS)),
            decode_tps=sum(column(_DECODE_TPS)),
            kv_tokens_used=sum(column(_KV_USED)),
            kv_tokens_max=sum(column(_KV_MAX)),
            kv_share_max=max([share for share in column(_KV_SHARE) if share is not None], default=None),
            prefix_query_tokens=query_tokens,
            prefix_hit_tokens=hit_tokens,
            preemptions=preemptions,
            itl=Histogram(tuple(sums[_BUCKETS_AT:]), itl_ms) if gaps or itl_ms else _NO_GAPS,
            busy_share=_mean(column(_BUSY)),
            gpu_utilisation_share=_mean(column(_GPU)),
            confidence=sum(column(_CONFIDENCE)) / (number + unknown),
            age_ms=(self._now_ns - min(chosen(self._received_ns))) / 1e6,
        )

    def _fresh_places(self, model: str | None) -> list[int] | None:
        """Places of the fresh ones of ``model``; ``None``: they are all there are."""
        if model is None and not self._silent:
            return None
        silent = set(self._silent)
        return [place for place in self._places_of(model) if place not in silent]

    def _places_of(self, model: str | None) -> Sequence[int]:
        if model is None or not self._order:
            return range(len(self._order))
        return [place for place, of in enumerate(self._columns[_MODEL]) if of == model]

    def known(self, model: str) -> int:
        """Replicas of ``model``, the silent ones included."""
        return len(self._places_of(model))

    def unknown(self, fleet: FleetView | None, model: str | None = None) -> int:
        """Replicas that run and say nothing: by Serve's count, else those (of ``model``) that fell silent."""
        states = self._columns[_STATE] if self._order else []
        stay = [place for place in self._places_of(model) if states[place] is not ReplicaState.DRAINING]
        speaking = len(stay) - len(set(self._silent).intersection(stay))
        return len(stay) - speaking if fleet is None else max(0, fleet.replicas_running - speaking)
