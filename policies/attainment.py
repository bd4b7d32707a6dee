"""Which requests kept their promises, counted by class and tenant: the one rule that gateways and the simulator share.

Of a stream, with the objectives of its class (``policies/objectives.py``)::

    TTFT        first byte - arrival              <= ttft_ms
    token gap   (end - first byte) / (tokens - 1) <= itl_ms      the mean of the stream, as goodput is defined
    whole       end - arrival                     <= e2e_ms, where that is promised

An answer that comes as a whole has no first byte of its own: it keeps its promises when it is there within ``e2e_ms``,
else within ``ttft_ms + (tokens - 1) * itl_ms``, the time a stream may take. A request with a deadline keeps its promise
when it is answered by then, however its bytes came. *Met* is: succeeded, and none of these late.

Source of the definition: goodput of DistServe (OSDI 2024), requests per second within all their latency objectives.

What this must not do: decide, read a clock, or keep anything that grows with the number of requests.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from policies.config import ObjectivesConfig
from policies.endings import is_demand, is_fault
from policies.events import Outcome
from policies.measures import ClassCounts, TenantCounts
from policies.types import Priority, Request

TENANTS_TOLD = 16
"""Tenants named in one report; the others are summed under :data:`OTHER`."""
OTHER = "other"
TENANTS_MAX = 512
"""Tenants counted by name in one window; those that come later are counted under :data:`OTHER`."""
UNSERVED_MAX = 4_096
"""Bodies remembered that were refused or failed, so that their repetitions are known; the oldest goes first."""

ObjectivesOf: TypeAlias = Callable[[Priority], ObjectivesConfig]


@dataclass(frozen=True, slots=True)
class Ending:
    """What a gateway knows of a request that ended; times in ns of its own clock."""

    outcome: Outcome
    code: str
    ended_ns: int
    first_byte_ns: int | None
    """``None``: there was none."""
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Lateness:
    """Which promises an answer broke."""

    ttft: bool = False
    itl: bool = False
    e2e: bool = False

    @property
    def any(self) -> bool:
        """Whether it broke one."""
        return self.ttft or self.itl or self.e2e


@dataclass(frozen=True, slots=True)
class Attainment:
    """Counts of one window, as a report holds them."""

    met: int
    repeats: int
    by_class: dict[str, ClassCounts]
    by_tenant: dict[str, TenantCounts]


def lateness(request: Request, ending: Ending, objectives: ObjectivesConfig) -> Lateness:
    """Which promises a request that succeeded broke."""
    if request.deadline_ns is not None:
        return Lateness(e2e=ending.ended_ns > request.deadline_ns)
    gaps = max(0, ending.output_tokens - 1)
    e2e_ms = (ending.ended_ns - request.arrival_ns) / 1e6
    if not request.stream or ending.first_byte_ns is None:
        whole_ms = objectives.e2e_ms
        return Lateness(e2e=e2e_ms > (objectives.ttft_ms + gaps * objectives.itl_ms if whole_ms is None else whole_ms))
    ttft_ms = (ending.first_byte_ns - request.arrival_ns) / 1e6
    gap_ms = (e2e_ms - ttft_ms) / gaps if gaps else 0.0
    late_e2e = objectives.e2e_ms is not None and e2e_ms > objectives.e2e_ms
    return Lateness(ttft_ms > objectives.ttft_ms, gap_ms > objectives.itl_ms, late_e2e)


_ARRIVALS, _SUCCEEDED, _MET, _REFUSED, _FAILED, _ABANDONED, _LATE_TTFT, _LATE_ITL, _LATE_E2E = range(9)
"""Places of a class's counts, the fields of :class:`ClassCounts` in order."""
_T_ARRIVALS, _T_SUCCEEDED, _T_MET, _T_REFUSED, _T_TOKENS = range(5)
"""Places of a tenant's, those of :class:`TenantCounts`."""


class AttainmentMeter:
    """Counts of one gateway between two reports. ``objectives_of`` is asked once per class and window."""

    def __init__(self, objectives_of: ObjectivesOf) -> None:
        self.objectives_of = objectives_of
        self._unserved: OrderedDict[int, None] = OrderedDict()
        self._open_window()

    def _open_window(self) -> None:
        self._repeats = 0
        self._classes: dict[Priority, list[int]] = {}
        self._tenants: dict[str, list[int]] = {}
        self._objectives: dict[Priority, ObjectivesConfig] = {}

    def arrived(self, request: Request) -> None:
        """A valid request came in."""
        self._of_class(request.priority)[_ARRIVALS] += 1
        self._of_tenant(request.tenant)[_T_ARRIVALS] += 1
        if request.fingerprint in self._unserved:
            self._repeats += 1

    def ended(self, request: Request, ending: Ending) -> bool:
        """A request that arrived is over; whether it kept its promises."""
        counts, tenant = self._of_class(request.priority), self._of_tenant(request.tenant)
        tenant[_T_TOKENS] += ending.prompt_tokens + ending.output_tokens
        if ending.outcome is Outcome.SUCCEEDED:
            return self._succeeded(request, ending, counts, tenant)
        if not is_demand(ending.outcome, ending.code):
            counts[_ARRIVALS] -= 1
        elif ending.outcome is Outcome.REFUSED:
            counts[_REFUSED] += 1
            tenant[_T_REFUSED] += 1
            self._remember(request.fingerprint)
        elif is_fault(ending.outcome, ending.code):
            counts[_FAILED] += 1
            self._remember(request.fingerprint)
        elif ending.outcome is Outcome.CANCELLED and self._waited_too_long(request, ending):
            counts[_ABANDONED] += 1
            self._remember(request.fingerprint)
        return False

    def take(self) -> Attainment:
        """Counts since the last call; they start again at zero."""
        by_class = {p.value: ClassCounts(max(0, row[0]), *row[1:]) for p, row in sorted(self._classes.items())}
        met = sum(counts.met for counts in by_class.values())
        taken = Attainment(met, self._repeats, by_class, largest(self._tenants))
        self._open_window()
        return taken

    def _succeeded(self, request: Request, ending: Ending, counts: list[int], tenant: list[int]) -> bool:
        late = lateness(request, ending, self._objectives_of(request.priority))
        met = not late.any
        counts[_SUCCEEDED] += 1
        counts[_MET] += met
        counts[_LATE_TTFT] += late.ttft
        counts[_LATE_ITL] += late.itl
        counts[_LATE_E2E] += late.e2e
        tenant[_T_SUCCEEDED] += 1
        tenant[_T_MET] += met
        self._unserved.pop(request.fingerprint, None)
        return met

    def _waited_too_long(self, request: Request, ending: Ending) -> bool:
        waited_ms = (ending.ended_ns - request.arrival_ns) / 1e6
        return ending.first_byte_ns is None and waited_ms > self._objectives_of(request.priority).ttft_ms

    def _objectives_of(self, priority: Priority) -> ObjectivesConfig:
        objectives = self._objectives.get(priority)
        if objectives is None:
            objectives = self._objectives[priority] = self.objectives_of(priority)
        return objectives

    def _remember(self, fingerprint: int) -> None:
        if not fingerprint:
            return
        self._unserved[fingerprint] = None
        self._unserved.move_to_end(fingerprint)
        if len(self._unserved) > UNSERVED_MAX:
            self._unserved.popitem(last=False)

    def _of_class(self, priority: Priority) -> list[int]:
        row = self._classes.get(priority)
        if row is None:
            row = self._classes[priority] = [0] * 9
        return row

    def _of_tenant(self, name: str) -> list[int]:
        row = self._tenants.get(name)
        if row is None:
            if len(self._tenants) >= TENANTS_MAX:
                name = OTHER
            row = self._tenants.setdefault(name, [0] * 5)
        return row


def largest(rows: dict[str, list[int]], told: int = TENANTS_TOLD) -> dict[str, TenantCounts]:
    """The ``told`` tenants with most tokens, then most arrivals, by name; the others summed under :data:`OTHER`."""
    names = sorted(rows, key=lambda n: (n == OTHER, -rows[n][_T_TOKENS], -rows[n][_T_ARRIVALS], n))
    rest = names[told:] if OTHER not in rows else [*names[told:-1], OTHER]
    kept = {name: TenantCounts(*rows[name]) for name in sorted(set(names) - set(rest))}
    if rest:
        kept[OTHER] = TenantCounts(*map(sum, zip(*[rows[name] for name in rest], strict=True)))
    return kept
