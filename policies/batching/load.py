"""What is sent to one replica, in the terms that a queue asks for.

:class:`LoadMeter` reads it from the replica's own reports, whose sums fade by :data:`FADING` a second, so that it knows
about the last half minute, or about the last :data:`REQUESTS` where that is longer: fewer say little::

    arrivals   finished + aborted + growth of (running + waiting)
    prompt     prompt tokens computed / requests begun
    output     tokens decoded / mean of requests begun and ended
    KV         tokens held / sequences running, over the reports

What is known from elsewhere (:class:`OfferedLoad`) comes first: a replica does not see requests that wait in front of
it, or are refused there. It must not decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from policies.queueing import Offered
from policies.types import ReplicaReport

FADING = 0.97
"""Share of what was counted that is left after a second."""

REQUESTS = 100.0
"""Requests below which sums fade more slowly, in proportion to how few they are ..."""

FEW_MIN = 0.1
"""... but not more slowly than by this: five minutes."""

FADING_QUICK = 0.8
"""As :data:`FADING` for telling that the load is another one: about the last five seconds."""

REQUESTS_QUICK = 10.0
"""As :data:`REQUESTS` for telling that."""

REQUESTS_MIN = 3.0
"""Requests that must have begun and ended before sizes are believed."""


@dataclass(frozen=True, slots=True)
class OfferedLoad:
    """Offered load of one replica. ``None``: not known, the replica's own reports are asked."""

    arrivals_ps: float | None = None
    """Requests per second that are sent to it, or would be if they did not wait in front of it."""
    prompt_tokens_mean: float | None = None
    """Prompt tokens of a request, those found in the prefix cache not counted."""
    output_tokens_mean: float | None = None
    waiting: float = 0.0
    """Its share of the requests that wait in gateways."""
    refusing: bool = True
    """Admission refuses what cannot be served in time, so that a queue does not grow without bound."""


class LoadMeter:
    """Load of one replica as its reports show it."""

    def __init__(self, fading: float = FADING, requests: float = REQUESTS) -> None:
        self._fading, self._requests = fading, requests
        self._seq = -1
        self._clear()

    def _clear(self) -> None:
        self._running = self._open = 0
        self._seconds = self._arrived = self._squares = self._begun = self._ended = 0.0
        self._prefilled = self._decoded = self._kv_tokens = self._seqs = 0.0

    def receive(self, report: ReplicaReport) -> None:
        """Count a report once; a lower sequence number is a new life of the engine and starts afresh."""
        if report.seq == self._seq:
            return
        if report.seq < self._seq:
            self._clear()
            self._seq = -1
        first, self._seq = self._seq < 0, report.seq
        seconds = report.window_ms / 1000
        few = self._arrived < self._requests
        kept = self._fading ** (seconds * max(FEW_MIN, self._arrived / self._requests) if few else seconds)
        ended = report.finished + report.aborted
        holds = report.running + report.waiting
        arrived = 0 if first else max(0, ended + holds - self._open)
        begun = 0 if first else max(0, ended + report.running - self._running)
        self._running, self._open = report.running, holds
        self._seconds = self._seconds * kept + seconds
        self._arrived = self._arrived * kept + arrived
        self._squares = self._squares * kept * kept + arrived
        self._begun = self._begun * kept + begun
        self._ended = self._ended * kept + ended
        self._prefilled = self._prefilled * kept + report.prefill_tokens
        self._decoded = self._decoded * kept + report.decode_tokens
        self._kv_tokens = self._kv_tokens * kept + report.kv_tokens_used * seconds
        self._seqs = self._seqs * kept + report.running * seconds

    def follow(self, other: LoadMeter) -> None:
        """Go on from what ``other`` counted of the same replica: what was before is of another load."""
        self._seconds, self._arrived, self._begun = other._seconds, other._arrived, other._begun
        self._squares = other._squares
        self._ended, self._prefilled, self._decoded = other._ended, other._prefilled, other._decoded
        self._kv_tokens, self._seqs = other._kv_tokens, other._seqs

    @property
    def running(self) -> float:
        """Sequences running at the ends of the windows, on average; 0 before the first."""
        return self._seqs / self._seconds if self._seconds else 0.0

    @property
    def error(self) -> float:
        """Relative standard error of what is counted: of arrivals ``1 / sqrt(n)``, of a mean length about as much.

        ``n`` are the requests that a faded sum rests on, ``(sum w)^2 / sum w^2``.
        """
        least = min(self._arrived, self._begun, self._ended)
        return min(1.0, math.sqrt(2 * self._squares / (self._arrived * least))) if least > 0 else 1.0

    @property
    def prefill_tps(self) -> float:
        """Prompt tokens computed per second."""
        return self._prefilled / self._seconds if self._seconds else 0.0

    def offered(self, waiting: int, told: OfferedLoad | None) -> Offered | None:
        """The load, with ``waiting`` requests in the engine; ``None`` while too few requests came and went."""
        told = told or OfferedLoad()
        prompt, output = told.prompt_tokens_mean, told.output_tokens_mean
        enough = self._begun >= REQUESTS_MIN and self._ended >= REQUESTS_MIN
        if prompt is None and enough:
            prompt = self._prefilled / self._begun
        if output is None and enough:
            output = 2 * self._decoded / (self._begun + self._ended)
        if prompt is None or output is None or self._seqs <= 0:
            return None
        arrivals = self._arrived / self._seconds if told.arrivals_ps is None else told.arrivals_ps
        return Offered(
            arrivals_ps=arrivals,
            prompt_tokens=prompt,
            output_tokens=max(1.0, output),
            kv_tokens_seq=self._kv_tokens / self._seqs,
            waiting=waiting + told.waiting,
            refusing=told.refusing,
        )
