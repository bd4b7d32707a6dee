"""Each replica against others of its kind: who takes longer for the same work.

Two replicas are of one *kind* when they have the same start-up limits, the same roofline (where known) and KV caches
within :data:`KV_RATIO_MAX` of each other. The kind's law is the median of each coefficient of its members' learned step
models; with it, what a replica did in its window of reports should have taken::

    expected_ms = a * steps + b * sequence_steps + c * kv_tokens / 1000 * steps + d * prefill_tokens
    ratio       = busy_ms / expected_ms
    slowness    = ratio / median ratio of its kind            of the others, where there is but one other

It is read from what engines measured, so that it shows within one window of reports, before the step model has learned
the new speed, and whatever load the replica has. Comparing ratios cancels what the law leaves out. A replica that did
too little in its window (``ReplicaSignals.pace``), or is alone of its kind, is not judged.

What this must not do: eject, or tell a slow device from a busy one next to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from policies.control.replicas import LEARNED_STEPS_MIN, ReplicaSignals
from policies.types import ReplicaId, StepCoefficients

KV_RATIO_MAX = 1.25
"""KV caches of one kind of engine differ by less: the rest of a device's memory is measured at its start."""

LAW_TICKS = 10
"""Ticks for which a kind's law is kept: coefficients move slowly, and sorting a thousand of them does not come free."""

Kind: TypeAlias = tuple[int, int, float, float, int]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All kinds of one tick."""

    members: Mapping[Kind, Sequence[ReplicaSignals]]
    laws: Mapping[Kind, StepCoefficients]
    """Of the kinds of which one is known; at most :data:`LAW_TICKS` ticks old."""
    slowness: Mapping[ReplicaId, float]
    """How many times longer than its kind each replica takes; only those that can be judged."""


class Peers:
    """Compares replicas at each tick; remembers of which kind each is and the laws of the kinds."""

    def __init__(self) -> None:
        self._kinds: dict[ReplicaId, Kind] = {}
        self._laws: dict[Kind, StepCoefficients] = {}
        self._age = LAW_TICKS
        self._ids: tuple[ReplicaId, ...] | None = None
        self._places: dict[Kind, list[int]] = {}
        """Places of each kind's members among :attr:`_ids`."""

    def compare(self, replicas: Sequence[ReplicaSignals], ids: tuple[ReplicaId, ...] | None = None) -> Comparison:
        """Each of ``replicas``, whose names are ``ids``, with those of its kind."""
        ids = tuple([r.replica_id for r in replicas]) if ids is None else ids
        self._age += 1
        members = self._members(replicas, ids) if self._age < LAW_TICKS else None
        if members is None:
            members = kinds_of(replicas)
            self._kinds = {r.replica_id: kind for kind, of_kind in members.items() for r in of_kind}
            self._laws = {kind: law for kind, of_kind in members.items() if (law := law_of(of_kind)) is not None}
            self._age, self._ids = 0, None
        slowness: dict[ReplicaId, float] = {}
        for kind, of_kind in members.items():
            law = self._laws.get(kind)
            if law is not None and len(of_kind) > 1:
                slowness.update(_against(_ratios(of_kind, law)))
        return Comparison(members, self._laws, slowness)

    def _members(
        self, replicas: Sequence[ReplicaSignals], ids: tuple[ReplicaId, ...]
    ) -> dict[Kind, list[ReplicaSignals]] | None:
        """``replicas`` by what they were last time; ``None`` where one is new."""
        if ids != self._ids:
            places: dict[Kind, list[int]] = {}
            for place, replica_id in enumerate(ids):
                kind = self._kinds.get(replica_id)
                if kind is None:
                    return None
                places.setdefault(kind, []).append(place)
            self._ids, self._places = ids, places
        return {kind: [replicas[place] for place in places] for kind, places in self._places.items()}


def kinds_of(replicas: Sequence[ReplicaSignals]) -> dict[Kind, list[ReplicaSignals]]:
    """Replicas by kind; a kind's last number tells sizes of KV caches apart, smallest first."""
    named: dict[tuple[int, int, float, float], list[ReplicaSignals]] = {}
    for replica in replicas:
        latest = replica.latest
        roofline = latest.roofline
        flops, bandwidth = (roofline.flops_per_s, roofline.bytes_per_s) if roofline is not None else (0.0, 0.0)
        key = (latest.running_seqs_hard, latest.step_tokens_hard, flops, bandwidth)
        named.setdefault(key, []).append(replica)
    kinds: dict[Kind, list[ReplicaSignals]] = {}
    for key, members in named.items():
        members.sort(key=lambda r: r.latest.kv_tokens_max)
        size, least = 0, members[0].latest.kv_tokens_max
        for replica in members:
            if replica.latest.kv_tokens_max > KV_RATIO_MAX * least:
                size, least = size + 1, replica.latest.kv_tokens_max
            kinds.setdefault((*key, size), []).append(replica)
    return kinds


def law_of(members: Sequence[ReplicaSignals]) -> StepCoefficients | None:
    """Median of each coefficient over the members that have learned some steps; ``None`` where none has."""
    models = [m for r in members if (m := r.latest.step_model) is not None and m.samples >= LEARNED_STEPS_MIN]
    if not models:
        return None
    return StepCoefficients(
        median([m.a_ms for m in models]),
        median([m.b_ms for m in models]),
        median([m.c_ms for m in models]),
        median([m.d_ms for m in models]),
        min(m.samples for m in models),
    )


def _ratios(members: Sequence[ReplicaSignals], law: StepCoefficients) -> list[tuple[ReplicaId, float]]:
    ratios = []
    a_ms, b_ms, c_ms, d_ms = law.a_ms, law.b_ms, law.c_ms, law.d_ms
    for r in members:
        if r.pace is None:
            continue
        busy_ms, steps, kv_tokens, gaps, prefill_tokens = r.pace
        expected_ms = (a_ms + c_ms * kv_tokens / 1000) * steps + b_ms * gaps + d_ms * prefill_tokens
        if expected_ms > 0:
            ratios.append((r.replica_id, busy_ms / expected_ms))
    return ratios


def _against(ratios: Sequence[tuple[ReplicaId, float]]) -> list[tuple[ReplicaId, float]]:
    if len(ratios) < 2:
        return []
    if len(ratios) == 2:
        (one, ratio_one), (other, ratio_other) = ratios
        if min(ratio_one, ratio_other) <= 0:
            return []
        return [(one, ratio_one / ratio_other), (other, ratio_other / ratio_one)]
    middle = median([ratio for _, ratio in ratios])
    return [(name, ratio / middle) for name, ratio in ratios] if middle > 0 else []
