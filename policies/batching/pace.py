"""How fast knobs move: down at once, up slowly, small changes not at all.

A knob rises to the least of :data:`RAISE_TICKS` solutions in a row that asked for more. Setting both knobs for both
objectives (``choose.py``) is another matter: predictions from some dozen requests are noisy, and a change costs a while
in which the engine settles. What is lost by staying is summed up, tick by tick, and the change is made when the sum
exceeds its price::

    lost  = max(0, lost + gain - margin)         met share times ticks; gain: the surely better pair's, else negative
    price = PRICE * TURN_FACTOR ** turns         turns: changes of direction in TURN_TICKS, with the one it would be

so a large gain is taken within some ticks, a small one when it has lasted, and a knob that has just moved goes back
only for much, and forth again only for very much. It must not solve anything.
"""

from __future__ import annotations

import math

from policies.types import Knobs

CHANGE_SHARE_MIN = 0.1
"""Smaller relative changes are not worth disturbing an engine."""

RAISE_TICKS = 8
"""Consecutive solutions that must ask for more before a knob rises; it rises to the least of them."""

RAISE_SHARE_MIN = 0.25
"""A rise smaller than this is not made: raising and lowering must not meet within 20 % noise."""

KEEP_UP_SLACK = 0.6
"""A budget that keeps up is lowered only to less than this share of it."""

PRICE = 1.0
"""What a change of both knobs costs: the met share of all requests for so many ticks."""

TURN_FACTOR = 12.0
"""Times as much that a change costs for each change of direction."""

TURN_TICKS = 600
"""Ticks after which a change and its direction are forgotten."""

CALM_TICKS = 120
"""Ticks in a row without much load before what stands is given up for the safest setting."""


class Pace:
    """Remembers what was asked for lately."""

    def __init__(self) -> None:
        self._asked: list[Knobs] = []
        self._calm = self._now = 0
        self._lost = 0.0
        self._turns: list[int] = []
        """Ticks of the last changes of direction, oldest first."""
        self._directions = [(0, 0), (0, 0)]
        """In which each knob moved last, 1 up, -1 down, 0 not yet, and when."""

    @property
    def calm(self) -> bool:
        """There has been no load to speak of for long, and no knob has turned or risen lately."""
        risen = any(last > 0 and self._now - at <= TURN_TICKS for last, at in self._directions)
        return self._calm >= CALM_TICKS and not self._turns and not risen

    def busy(self, much: bool) -> None:
        """Note whether there is much load in this tick."""
        self._calm = 0 if much else self._calm + 1

    def settle(self) -> None:
        """A change was made: what was asked for before does not count any more."""
        self._asked = []
        self._lost = 0.0

    def remember(self, solved: Knobs) -> None:
        """Note the solution of one tick."""
        self._asked = [*self._asked, solved][-(RAISE_TICKS - 1) :]

    def seqs(self, current: int | None, solved: Knobs, hard: int) -> int:
        """Next cap on running sequences."""
        asked = [k.running_seqs_max for k in self._asked]
        return _step(current, solved.running_seqs_max, asked, hard, math.inf)

    def tokens(self, current: int | None, solved: Knobs, hard: int, up_factor_max: float) -> int:
        """Next token budget."""
        return _step(current, solved.step_tokens_max, [k.step_tokens_max for k in self._asked], hard, up_factor_max)

    def tick(self) -> None:
        """One more tick."""
        self._now += 1
        if self._turns and self._now - self._turns[0] > TURN_TICKS:
            del self._turns[0]

    def lose(self, gain: float, before: Knobs, after: Knobs) -> bool:
        """Note a tick in which ``after`` is better than ``before`` by ``gain`` beyond the margin; whether it is set."""
        self._lost = max(0.0, self._lost + gain)
        if self._lost < PRICE:
            return False
        turns = len(self._turns) + any(self._turning(before, after, TURN_TICKS))
        return self._lost >= PRICE * TURN_FACTOR**turns

    def moved(self, before: Knobs, after: Knobs) -> None:
        """Note a change and, where a knob turned, that."""
        if any(self._turning(before, after, self._now)):
            self._turns.append(self._now)
        for i, direction in enumerate(_directions(before, after)):
            if direction:
                self._directions[i] = direction, self._now

    def _turning(self, before: Knobs, after: Knobs, ticks: int) -> list[bool]:
        """Of each knob, whether it would move against its last direction, where that is not older than ``ticks``."""
        since = self._now - ticks
        return [
            direction != 0 and last == -direction and at >= since
            for direction, (last, at) in zip(_directions(before, after), self._directions, strict=True)
        ]

    def forget(self) -> None:
        """The load or the engine is another one: what was before says nothing of it."""
        self._turns.clear()
        self._directions = [(0, 0), (0, 0)]
        self._lost = 0.0


def _directions(before: Knobs, after: Knobs) -> tuple[int, int]:
    """Of cap and budget: 1 up, -1 down, 0 as it was or not known."""
    return (
        _sign(before.running_seqs_max, after.running_seqs_max),
        _sign(before.step_tokens_max, after.step_tokens_max),
    )


def _sign(old: int | None, new: int | None) -> int:
    return 0 if old is None or new is None else (new > old) - (new < old)


def keep_up(current: int | None, want: int) -> int:
    """A budget for prompts that come: up at once, because they queue, and down only where it is far too large."""
    if current is None or not current * KEEP_UP_SLACK <= want <= current * (1 + RAISE_SHARE_MIN):
        return want
    return current


def _step(current: int | None, want: int | None, before: list[int | None], hard: int, up_factor_max: float) -> int:
    """One knob's next value; ``before``: what the last solutions asked for."""
    if want is None:
        want = hard
    if current is None or want <= current * (1 - CHANGE_SHARE_MIN):
        return want
    if want <= current:
        return current
    least = min([want, *[hard if value is None else value for value in before]])
    worth = least >= current * (1 + RAISE_SHARE_MIN) or least == hard
    if len(before) + 1 < RAISE_TICKS or least <= current or not worth:
        return current
    return max(current + 1, int(min(least, current * up_factor_max)))
