"""Decides the order of what waits inside one tenant and one class: deadlines, then tasks by age and by what they took.

Requests with a deadline come first, earliest first. The others are ordered by a number of virtual tokens:

    clock             grows by HALF of the tokens that the tenant is served; a task that is served while no other of the
                      tenant waits takes the clock with it: what nobody else wanted counts against nobody
    number(newcomer)  clock + HALF * ahead * min(1, tokens / mean)
    number(call)      end of its task's calls so far, at least clock - credit_tokens_max
    end               number(call) + tokens

A newcomer is a request without a task, or the first of one. ``ahead`` is what waits in the tenant and was not beyond
its task's share, ``mean`` its mean size; the clock reaches a newcomer's number when it has been served. So

* the calls of a task go ahead of newcomers, because its end stays behind the clock, unless it takes more than half of
  what the tenant is served: then it falls behind them. A thousand calls at once are one task and not a thousand;
* a short request passes long ones, but those are passed only until the clock has gone as far as what was ahead of them
  when they came: nobody is passed by more short requests than that.

What this must not do: know other tenants, or time.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from policies.admission.line import Line, Place

HALF = 0.5
"""Virtual tokens by which the clock grows for each token served: the share above which a task falls behind."""


@dataclass(slots=True)
class TaskTag:
    """What one task took, in virtual tokens."""

    end: float = 0.0
    """Virtual end of its calls so far."""
    begun: bool = False
    """It had a call."""
    waiting: int = 0
    """Calls that wait."""
    number_last: float = 0.0
    """Number of the last of them."""


@dataclass(slots=True)
class Spot:
    """Where one waiting request stands in its tenant's queue, and what it changed there."""

    request_id: str
    tokens: int
    place: Place
    due: bool
    """It has a deadline, and stands in that line."""
    fair: bool
    """It was within its task's share when it came."""
    end: float
    """Virtual end of the task with it."""
    task: TaskTag | None


class TenantQueue:
    """See the module. The fields in front are the class queue's, which orders tenants by them."""

    __slots__ = ("_clock", "_credit", "_due", "_fair_requests", "_fair_tokens", "_tagged", "counter", "epoch", "floor",
                 "key", "name", "weight")  # fmt: skip

    def __init__(self, name: str, weight: float, clock: float, credit_tokens_max: int) -> None:
        self.name = name
        self.weight = weight
        self.counter = 0.0
        """Tokens served over weight."""
        self.floor = 0.0
        """Value of the counter when the tenant last came in: corrections do not go below."""
        self.epoch = -1
        """Backlog of the class that the counter belongs to."""
        self.key: tuple[float, int, int] | None = None
        """Its place among tenants that wait."""
        self._clock = clock
        self._credit = credit_tokens_max
        self._due = Line()
        self._tagged = Line()
        self._fair_tokens = 0
        self._fair_requests = 0

    @property
    def requests(self) -> int:
        """Requests that wait."""
        return len(self._due) + len(self._tagged)

    @property
    def tokens(self) -> int:
        """Their tokens."""
        return self._due.total + self._tagged.total

    @property
    def clock(self) -> float:
        """Virtual tokens so far."""
        return self._clock

    def add(self, request_id: str, tokens: int, deadline_ns: int | None, order: int, task: TaskTag | None) -> Spot:
        """Let a request wait. ``order`` grows with each; ``task`` is ``None`` for a goal of its own."""
        number = self._number(task, tokens)
        newcomer = task is None or not task.begun
        fair = newcomer or number <= self._clock
        place = (number, order) if deadline_ns is None else (float(deadline_ns), order)
        spot = Spot(request_id, tokens, place, deadline_ns is not None, fair, number + tokens, task)
        self._line(spot).add(place, request_id, tokens)
        self._fair_tokens += tokens * fair
        self._fair_requests += fair
        if task is not None:
            self._took(task, number if newcomer else None, tokens)
            task.waiting += 1
            if not spot.due:
                task.number_last = number
        return spot

    def remove(self, spot: Spot) -> None:
        """Forget a request that is not served."""
        self._take(spot)
        if spot.task is not None:
            spot.task.end -= spot.tokens

    def served(self, spot: Spot) -> None:
        """A request's turn came: it waits no longer, and the clock goes on."""
        alone = self.requests == (1 if spot.task is None else spot.task.waiting)
        self._take(spot)
        self._clock += HALF * spot.tokens
        if alone:
            self._clock = max(self._clock, spot.end)

    def charge(self, task: TaskTag | None, tokens: int) -> None:
        """Count work that did not wait here, or correct what was counted (``tokens`` may be negative)."""
        if task is not None:
            self._took(task, None if task.begun else self._clock, tokens)
        if tokens <= 0:
            return
        if self.requests:
            self._clock += HALF * tokens
        else:
            self._clock = self._clock + tokens if task is None else max(self._clock + HALF * tokens, task.end)

    def first(self) -> str | None:
        """Id of the request that is next."""
        return self._due.first() or self._tagged.first()

    def tokens_ahead(self, task: TaskTag | None, tokens: int) -> int:
        """Tokens that wait here and would go before such a newcomer without a deadline."""
        return self._due.total + self._tagged.tokens_until(self._number(task, tokens))

    def tokens_before(self, counter: float) -> int:
        """Tokens served until this tenant's counter is above ``counter``, if nobody else comes."""
        if self.counter + self.tokens / self.weight <= counter:
            return self.tokens
        served = 0
        for tokens in chain(self._due.tokens(), self._tagged.tokens()):
            if self.counter + served / self.weight > counter:
                break
            served += tokens
        return served

    def _took(self, task: TaskTag, begin: float | None, tokens: int) -> None:
        """A task has one call more (or another size), and begins at ``begin`` if it is new."""
        task.end = (max(task.end, self._clock - self._credit) if begin is None else begin) + tokens
        task.begun = True

    def _line(self, spot: Spot) -> Line:
        return self._due if spot.due else self._tagged

    def _take(self, spot: Spot) -> None:
        self._line(spot).remove(spot.place)
        self._fair_tokens -= spot.tokens * spot.fair
        self._fair_requests -= spot.fair
        if spot.task is not None:
            spot.task.waiting -= 1

    def _number(self, task: TaskTag | None, tokens: int) -> float:
        if task is None or not task.begun:
            mean = (self._fair_tokens + tokens) / (self._fair_requests + 1)
            size = min(1.0, tokens / mean) if mean > 0 else 0.0
            return self._clock + HALF * self._fair_tokens * size
        number = max(task.end, self._clock - self._credit)
        return max(number, task.number_last) if task.waiting else number
