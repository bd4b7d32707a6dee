"""The ledger: every decision with its inputs, in a bounded ring.

An entry is written when something changes (or, in shadow mode, would), and when a change was held back for a reason
worth knowing. A steady fleet writes nothing. Sequence numbers start at 1 and never repeat within one life of the
controller, so that a reader can page with :meth:`Ledger.since` and see from a gap that it came too late.

An entry is written twice at most: when it is decided, and when its effect is known (:meth:`Ledger.judge`). What was not
acted on, what changed nothing and what the guard itself did gets no verdict.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from policies.steering import Alternative, Verdict
from policies.types import Decision, Reason


@dataclass(frozen=True, slots=True)
class Draft:
    """A decision before it has a place in the ledger. Fields as in :class:`policies.types.Decision`."""

    lever: str
    target: str
    before: Mapping[str, float | int | None]
    after: Mapping[str, float | int | None]
    reason: Reason
    inputs: Mapping[str, float | int | str | None]
    predicted: Mapping[str, float] = field(default_factory=dict)
    alternatives: tuple[Alternative, ...] = ()
    acted: bool = True


class Ledger:
    """Ring of the last ``decisions_max`` decisions."""

    def __init__(self, decisions_max: int) -> None:
        self._ring: deque[Decision] = deque(maxlen=decisions_max)
        self._seq = 0

    def write(self, draft: Draft, tick: int, at_ns: int = 0, conditions: tuple[str, ...] = ()) -> Decision:
        """Give ``draft`` the next sequence number and keep it; the oldest entry goes when the ring is full.

        Args:
            draft: what was decided.
            tick: number of the tick.
            at_ns: the controller's clock at the tick.
            conditions: names of the conditions that were active.
        """
        self._seq += 1
        entry = Decision(
            seq=self._seq,
            tick=tick,
            lever=draft.lever,
            target=draft.target,
            before=draft.before,
            after=draft.after,
            acted=draft.acted,
            reason=draft.reason,
            inputs=draft.inputs,
            predicted=draft.predicted,
            at_ns=at_ns,
            conditions=conditions,
            alternatives=draft.alternatives,
        )
        self._ring.append(entry)
        return entry

    def judge(self, seq: int, verdict: Verdict, text: str, realised: Mapping[str, float], tick: int) -> Decision | None:
        """Write the verdict into an entry; ``None`` when it has left the ring already."""
        index = seq - self._ring[0].seq if self._ring else -1
        if not 0 <= index < len(self._ring):
            return None
        entry = replace(self._ring[index], verdict=verdict, verdict_text=text, realised=realised, judged_tick=tick)
        self._ring[index] = entry
        return entry

    def since(self, seq: int, limit: int) -> list[Decision]:
        """The first ``limit`` entries after ``seq``, oldest first: page by passing the last one's ``seq`` again."""
        if limit <= 0 or not self._ring:
            return []
        first = self._ring[0].seq
        start = max(0, seq + 1 - first)
        return list(islice(self._ring, start, start + limit))

    def latest(self, limit: int) -> list[Decision]:
        """The newest ``limit`` entries, oldest of them first."""
        return self.since(self._seq - limit, limit) if limit > 0 else []

    @property
    def last_seq(self) -> int:
        """Sequence number of the newest entry; 0 when nothing was ever written."""
        return self._seq

    def __len__(self) -> int:
        return len(self._ring)
