"""Several sources at once: a flash crowd over steady traffic, chat beside agents."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from autoscaling.simulator.spec import SimRequest, Source, SourceFactory
from autoscaling.simulator.workload.trace import TraceError, stream_of


class Mixture:
    """Sources side by side, their requests numbered anew."""

    def __init__(self, name: str, parts: Sequence[Source]) -> None:
        self.name = name
        self._parts = parts
        self._made = 0
        self._owners: dict[int, tuple[int, SimRequest]] = {}

    def arrivals(self) -> Iterator[SimRequest]:
        """Arrivals of all parts by growing time."""
        streams = [_keyed(number, part) for number, part in enumerate(self._parts)]
        for _, number, _, request in heapq.merge(*streams):
            yield self._adopt(number, request)

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:
        """What the part that made the request makes of its end."""
        owner = self._owners.pop(request.index, None)
        if owner is None:
            return ()
        number, original = owner
        made = self._parts[number].follow_ups(original, succeeded, now_ns)
        return [self._adopt(number, follow_up) for follow_up in made]

    def _adopt(self, number: int, request: SimRequest) -> SimRequest:
        index = self._made
        self._made += 1
        self._owners[index] = (number, request)
        return replace(request, index=index, task=f"{number}/{request.task}" if request.task else "")


def _keyed(number: int, part: Source) -> Iterator[tuple[int, int, int, SimRequest]]:
    """Arrivals of one part with what they are merged by."""
    return ((request.arrival_ns, number, request.index, request) for request in part.arrivals())


def mixture(*factories: SourceFactory, name: str = "mixture") -> SourceFactory:
    """All of ``factories`` at once, each with a stream of its own."""
    if not factories:
        raise TraceError("a mixture needs at least one source", name)

    def source(rng: Random) -> Source:
        seed = stream_of(rng)
        return Mixture(name, [make(Random(f"{seed}/{n}")) for n, make in enumerate(factories)])

    return source
