"""What rules say of one tick, and conditions as others read them.

A rule's :class:`Finding` is *high* (begin), *low* (end) or neither; a :class:`Condition` is that with hysteresis.

Values only, but for the hysteresis. What this must not do: judge signals.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from policies.control.catalogue import SPECS, ConditionSpec
from policies.types import ReplicaId

NAMED_MAX = 3
"""Replicas named in a condition's text."""


@dataclass(frozen=True, slots=True)
class Condition:
    """One named condition at one tick."""

    name: str
    active: bool
    since_ns: int | None
    """When it last became active or inactive; ``None`` when it never changed."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    """Figures of the last tick that had any."""
    text: str = ""
    confidence: float = 0.0
    """0..1: confidence in the signals it is read from, times how far the number of samples can be trusted.
    0 while its figures are unknown."""
    targets: tuple[ReplicaId, ...] = ()
    """Replicas it is about, worst first; empty where it is about the model, and while inactive."""
    burning: tuple[str, ...] = ()
    """Of SLO burns: ``CLASS/OBJECTIVE``, worst first; the class is ``all`` where classes are not told apart."""

    @property
    def spec(self) -> ConditionSpec:
        """Formula, detection time and next step."""
        return SPECS[self.name]

    @property
    def objectives(self) -> tuple[str, ...]:
        """Of SLO burns: which objectives burn (``ttft``, ``itl``, ``e2e``, ``availability``), worst first."""
        return tuple(dict.fromkeys(name.rpartition("/")[2] for name in self.burning))


class Finding(NamedTuple):
    """What a rule says of one tick. Neither high nor low: the state stays."""

    high: bool
    low: bool
    evidence: Mapping[str, float]
    text: str
    certainty: float = 1.0
    """0..1, how far the number of samples can be trusted; see :func:`certainty`."""
    targets: Sequence[ReplicaId] = ()
    burning: tuple[str, ...] = ()


UNKNOWN = Finding(False, False, {}, "unknown: no fresh figures", 0.0)


def certainty(samples: float) -> float:
    """How far a share of ``samples`` can be trusted: one half at 5, nine tenths at 45."""
    return samples / (samples + 5.0)


def named(replicas: Sequence[ReplicaId]) -> str:
    """Names of replicas for a text, the first few of them."""
    more = len(replicas) - NAMED_MAX
    return ", ".join(replicas[:NAMED_MAX]) + (f" and {more} more" if more > 0 else "")


class Hysteresis:
    """State of one condition: it changes after ``on_ticks`` high or ``off_ticks`` low findings in a row."""

    def __init__(self, spec: ConditionSpec) -> None:
        self.spec = spec
        self._active = False
        self._streak = 0
        self._since_ns: int | None = None
        self._evidence: Mapping[str, float] = {}
        self._targets: tuple[ReplicaId, ...] = ()
        self._burning: tuple[str, ...] = ()

    def step(self, finding: Finding, coverage: float, now_ns: int) -> Condition:
        """The condition after one more finding; ``coverage`` (0..1) says how far its signals can be trusted."""
        against = finding.low if self._active else finding.high
        self._streak = self._streak + 1 if against else 0
        if self._streak >= (self.spec.off_ticks if self._active else self.spec.on_ticks):
            self._active, self._streak, self._since_ns = not self._active, 0, now_ns
        self._evidence = finding.evidence or self._evidence
        if not self._active:
            self._targets, self._burning = (), ()
        elif finding.high or finding.targets or finding.burning:
            self._targets, self._burning = tuple(finding.targets), finding.burning
        return Condition(
            name=self.spec.name,
            active=self._active,
            since_ns=self._since_ns,
            evidence=self._evidence,
            text=finding.text,
            confidence=round(coverage * finding.certainty, 3),
            targets=self._targets,
            burning=self._burning,
        )
