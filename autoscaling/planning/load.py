"""What a load asks for, before anything is simulated: lengths, rates, cached prefixes, and its hardest windows.

A load is played through once without engines: each request is taken to end ``TTFT objective + output * ITL objective``
after it arrived, so that closed loops go on. Prompt tokens count as cached where their leading blocks were ever seen
before: no fleet can have a larger share of hits, which makes every demand computed from this a lower bound.

Views of a load (a window of it, or the whole of it faster) are sources themselves.

Decides nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from random import Random

from autoscaling.simulator.report import percentile
from autoscaling.simulator.spec import SimRequest, Source, SourceFactory
from policies.config import ObjectivesConfig

LOOK_REQUESTS = 4_096
"""So many requests lie between two looks whether to stop."""

REQUESTS_MAX = 5_000_000
"""Longer loads are refused."""

WINDOW_S = 300
"""Length of a hard window."""

PEAK_S = 30
"""Shorter time over which the second hard window is looked for: bursts are what TTFT breaks in."""

WARM_S = 120
"""Played before a hard window and not judged, to fill batches and caches."""

LONG_REQUESTS = 4_000
"""Loads with more requests, and longer than three windows, are searched on their hard windows."""


class LoadError(ValueError):
    """A load that cannot be planned for."""


@dataclass(frozen=True, slots=True)
class Window:
    """Part of a load in seconds: played from ``begin_s``, judged from ``judged_s``."""

    begin_s: float
    judged_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """One row per request, in order of arrival, and what follows from them."""

    arrival_ns: array[int]
    prompt_tokens: array[int]
    uncached_tokens: array[int]
    output_tokens: array[int]
    closed: bool
    """What comes depends on when answers do."""

    @property
    def requests(self) -> int:
        """How many."""
        return len(self.arrival_ns)

    @property
    def span_s(self) -> float:
        """From 0 to the last arrival, at least a second."""
        return max(1.0, self.arrival_ns[-1] / 1e9)

    @property
    def prompt_mean(self) -> float:
        """Tokens of a prompt."""
        return sum(self.prompt_tokens) / self.requests

    @property
    def uncached_mean(self) -> float:
        """Tokens of a prompt that no cache could hold."""
        return sum(self.uncached_tokens) / self.requests

    @property
    def output_mean(self) -> float:
        """Tokens of an answer."""
        return sum(self.output_tokens) / self.requests

    @property
    def shared_share(self) -> float:
        """Largest possible share of prefix hits."""
        return 1 - sum(self.uncached_tokens) / sum(self.prompt_tokens)

    @property
    def context_mean(self) -> float:
        """KV tokens of a sequence half way through its answer, by the time it spends there."""
        weights = sum(self.output_tokens)
        pairs = zip(self.prompt_tokens, self.output_tokens, strict=True)
        return sum((p + o / 2) * o for p, o in pairs) / weights

    def token_rates(self, begin_s: float, end_s: float) -> tuple[float, float, float]:
        """Requests, uncached prompt tokens and output tokens per second that arrive in ``[begin_s, end_s)``."""
        rows = [i for i, at in enumerate(self.arrival_ns) if begin_s <= at / 1e9 < end_s]
        length = max(1e-9, end_s - begin_s)
        prompt = sum(self.uncached_tokens[i] for i in rows)
        output = sum(self.output_tokens[i] for i in rows)
        return len(rows) / length, prompt / length, output / length

    def windows(self, prefill_ms: float, decode_ms: float) -> tuple[Window, ...]:
        """The hardest windows by engine time (``prefill_ms`` and ``decode_ms`` per token).

        None for a short load, and for a closed one, whose middle cannot be played without its beginning. The first
        seconds, before caches fill, do not count as hard.
        """
        if self.closed or self.requests <= LONG_REQUESTS or self.span_s < 3 * WINDOW_S:
            return ()
        work = [0.0] * WARM_S + self._work_ms(prefill_ms, decode_ms)[WARM_S:]
        long_at = _largest(work, WINDOW_S)
        short_at = _largest(work, PEAK_S)
        found = [self._window(long_at)]
        burst_at = max(WARM_S, min(short_at - WINDOW_S // 3, len(work) - WINDOW_S))
        if abs(burst_at - long_at) > WINDOW_S // 3:
            found.append(self._window(burst_at))
        return tuple(found)

    def peak_ms(self, prefill_ms: float, decode_ms: float, length_s: int) -> float:
        """Engine time that the hardest ``length_s`` seconds ask for, in ms."""
        work = self._work_ms(prefill_ms, decode_ms)
        length_s = min(length_s, len(work))
        at = _largest(work, length_s)
        return sum(work[at : at + length_s])

    def peak_s(self, prefill_ms: float, decode_ms: float, length_s: int) -> tuple[float, float]:
        """Begin and end of the hardest ``length_s`` seconds."""
        at = _largest(self._work_ms(prefill_ms, decode_ms), length_s)
        return float(at), float(at + min(length_s, int(self.span_s) + 1))

    def _work_ms(self, prefill_ms: float, decode_ms: float) -> list[float]:
        work = [0.0] * (int(self.span_s) + 1)
        for at, prompt, output in zip(self.arrival_ns, self.uncached_tokens, self.output_tokens, strict=True):
            work[min(len(work) - 1, int(at / 1e9))] += prompt * prefill_ms + output * decode_ms
        return work

    def _window(self, at: int) -> Window:
        return Window(float(max(0, at - WARM_S)), float(at), float(at + WINDOW_S))


def _largest(work: Sequence[float], length: int) -> int:
    """Begin of the run of ``length`` values with the largest sum, the first of equal ones."""
    length = min(length, len(work))
    total = best = sum(work[:length])
    at = 0
    for i in range(length, len(work)):
        total += work[i] - work[i - length]
        if total > best * (1 + 1e-12):
            best, at = total, i - length + 1
    return at


class LoadEndedError(Exception):
    """Somebody asked to stop before the load was known."""


def measure(
    factory: SourceFactory, seed: int, objectives: ObjectivesConfig, stop: Callable[[], bool] = lambda: False
) -> LoadFigures:
    """Play the load once without engines; ``stop`` is asked now and then.

    Raises:
        LoadError: it has no request, or more than :data:`REQUESTS_MAX`.
        LoadEndedError: ``stop`` said so.
    """
    source = factory(Random(f"{seed}/source"))
    columns = tuple(array("q") for _ in range(4))
    seen: set[int] = set()
    played = _Played(source)
    for request in played.requests():
        if len(columns[0]) >= REQUESTS_MAX:
            raise LoadError(f"more than {REQUESTS_MAX:,} requests; plan for a part of the load (duration or limit)")
        if len(columns[0]) % LOOK_REQUESTS == LOOK_REQUESTS - 1 and stop():
            raise LoadEndedError
        cached = _cached_tokens(request, seen)
        row = (request.arrival_ns, request.prompt_tokens, request.prompt_tokens - cached, request.output_tokens)
        for column, value in zip(columns, row, strict=True):
            column.append(value)
        length_ms = objectives.ttft_ms + request.output_tokens * objectives.itl_ms
        played.ends(request, request.arrival_ns + round(length_ms * 1e6))
    if not columns[0]:
        raise LoadError("the load has no request")
    order = sorted(range(len(columns[0])), key=columns[0].__getitem__)
    arrivals, prompts, uncached, outputs = (array("q", (column[i] for i in order)) for column in columns)
    return LoadFigures(arrivals, prompts, uncached, outputs, played.closed)


class _Played:
    """Hands out a source's requests in the order in which they come; the caller says when each ends."""

    def __init__(self, source: Source) -> None:
        self.closed = False
        self._source = source
        self._open: list[tuple[int, int, SimRequest]] = []
        self._coming: list[tuple[int, int, SimRequest]] = []

    def ends(self, request: SimRequest, at_ns: int) -> None:
        """``request`` is over at ``at_ns``."""
        heappush(self._open, (at_ns, request.index, request))

    def requests(self) -> Iterator[SimRequest]:
        """All of them."""
        arrivals = self._source.arrivals()
        fresh = next(arrivals, None)
        while fresh is not None or self._coming or self._open:
            comes_ns = self._coming[0][0] if self._coming else None
            due_ns = [t for t in (comes_ns, fresh.arrival_ns if fresh else None) if t is not None]
            if self._open and (not due_ns or self._open[0][0] <= min(due_ns)):
                ends_ns, _, ended = heappop(self._open)
                for follower in self._source.follow_ups(ended, True, ends_ns):
                    self.closed = True
                    heappush(self._coming, (follower.arrival_ns, follower.index, follower))
            elif comes_ns is not None and (fresh is None or comes_ns <= fresh.arrival_ns):
                yield heappop(self._coming)[2]
            elif fresh is not None:
                yield fresh
                fresh = next(arrivals, None)


def _cached_tokens(request: SimRequest, seen: set[int]) -> int:
    blocks = 0
    for block in request.blocks:
        if block not in seen:
            break
        blocks += 1
    seen.update(request.blocks)
    seen.update(request.blocks_after)
    return min(blocks * request.block_tokens, request.prompt_tokens - 1)


# --- views of a load --------------------------------------------------------------------------------------------------


class _View:
    """A source that plays part of another, faster if asked. Indices stay: follow-ups find their sessions."""

    def __init__(self, source: Source, begin_ns: int, end_ns: int | None, speed: float) -> None:
        self.name = source.name
        self._source, self._begin_ns, self._end_ns, self._speed = source, begin_ns, end_ns, speed

    def arrivals(self) -> Iterator[SimRequest]:
        """Those within the part, from 0 on."""
        for request in self._source.arrivals():
            if self._end_ns is not None and request.arrival_ns >= self._end_ns:
                return
            if request.arrival_ns >= self._begin_ns:
                yield replace(request, arrival_ns=round((request.arrival_ns - self._begin_ns) / self._speed))

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:
        """What the source says; pauses keep their length."""
        return self._source.follow_ups(request, succeeded, now_ns)


def part_of(factory: SourceFactory, window: Window) -> SourceFactory:
    """The load within ``window``, its begin at 0."""
    begin_ns, end_ns = round(window.begin_s * 1e9), round(window.end_s * 1e9)
    return lambda rng: _View(factory(rng), begin_ns, end_ns, 1.0)


def faster(factory: SourceFactory, speed: float) -> SourceFactory:
    """The same requests or sessions, arriving ``speed`` times as fast."""
    return lambda rng: _View(factory(rng), 0, None, speed)


def shares_above(values: Sequence[float], limit: float) -> float:
    """Share of ``values`` above ``limit``."""
    return sum(v > limit for v in values) / len(values)


def quantile(values: Sequence[float], q: float) -> float:
    """Quantile of unsorted ``values``."""
    return percentile(sorted(values), q)
