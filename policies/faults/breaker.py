"""One replica's circuit breaker: gets no requests after failures in a row, then one at a time, then all again.

    CLOSED --breaker_failures failures in a row--> OPEN --its time is over--> HALF_OPEN --probation_requests--> CLOSED
       |                                           ^  ^                          |            answered
       +--judged against its peers (health.py)-----+  +--------a probe failed----+

    time without requests = min(eject_ms_max, eject_ms * 2**n) * uniform(0.75, 1)

``n`` counts ejections that followed each other: 0 again when the replica was closed for longer than the ejection
before had lasted. One while no other replica takes requests does not count: what all of them suffer from is not this
one's fault, and nobody else can serve when it ends. Drawn times keep gateways that ejected a replica together from
probing it together.

Only failures of different requests count: one client that repeats a request which fails closes nothing for others. A
failure without a fingerprint (0) counts by itself: no request can be at fault when there is no connection.

A replica in HALF_OPEN that no request is sent to for a second is due for one: the router may believe that it is as slow
as it was, and would never learn otherwise.

A stream's probe without its first byte for the time of the last ejection, or for as long as was predicted where that is
longer, has failed: what waits there would wait for ever longer with a further one behind it. A probe that says nothing
of itself (its client left, or its answer comes as a whole and may take any time) is given up after the time of the last
ejection, and another one may go.

What this must not do: know other replicas, or how many may be left alone at once.
"""

from __future__ import annotations

import random
from enum import StrEnum

from policies.config import FaultsConfig

JITTER_SHARE = 0.25
"""Ejections are shorter by up to this share, drawn evenly."""

PROBE_DUE_NS = 1_000_000_000
"""Time without a probe after which one is sent whatever the router would say."""

PREDICTED_MS_MAX = 600_000.0
"""Longest prediction that is waited for."""

DOUBLINGS_MAX = 30
"""Ejections in a row that are counted; the time itself is bounded by ``eject_ms_max`` long before."""


class BreakerState(StrEnum):
    """Whether a replica takes requests."""

    CLOSED = "closed"
    """It does."""
    OPEN = "open"
    """It does not."""
    HALF_OPEN = "half_open"
    """One at a time."""


class Breaker:
    """State of one replica. Times are ``now_ns`` of the gateway's monotonic clock."""

    __slots__ = (
        "_closed_ns", "_doublings", "_eject_ns", "_expected", "_fingerprints", "_nameless", "_passed",
        "_probe_until_ns", "_probed_ns", "_reopen_ns", "code", "state", "text",
    )  # fmt: skip

    def __init__(self) -> None:
        self.state = BreakerState.CLOSED
        self.code = ""
        """Why it was ejected last: ``failures``, or a judgement's code. Empty: never, or it is closed."""
        self.text = ""
        """The same for people."""
        self._fingerprints: set[int] = set()
        """Of the requests that failed in a row; fewer than ``breaker_failures``."""
        self._nameless = 0
        self._doublings = 0
        self._eject_ns = 0
        self._reopen_ns = 0
        self._closed_ns: int | None = None
        self._probe_until_ns: int | None = None
        self._expected = False
        """The probe's first byte, by then."""
        self._probed_ns = 0
        """Of the last probe, or since it is HALF_OPEN."""
        self._passed = 0

    @property
    def failures(self) -> int:
        """Failures of different requests in a row."""
        return len(self._fingerprints) + self._nameless

    @property
    def probing(self) -> bool:
        """Whether a probe is under way."""
        return self._probe_until_ns is not None

    def takes(self, now_ns: int) -> bool:
        """Whether it may be sent a request now; lets time move the breaker on."""
        if self.state is BreakerState.OPEN and now_ns >= self._reopen_ns:
            self.state = BreakerState.HALF_OPEN
            self._passed = 0
            self._probed_ns = now_ns
        if self._probe_until_ns is not None and now_ns >= self._probe_until_ns and not self._expected:
            self._probe_until_ns = None
        return self.state is not BreakerState.OPEN and self._probe_until_ns is None

    def changes_ns(self) -> int | None:
        """When :meth:`takes` or :meth:`unanswered` turns true by time alone; ``None``: only an event can."""
        return self._reopen_ns if self.state is BreakerState.OPEN else self._probe_until_ns

    def probe_due_ns(self) -> int | None:
        """From when on it should be sent a probe; ``None``: it should not."""
        waits = self.state is BreakerState.HALF_OPEN and self._probe_until_ns is None
        return self._probed_ns + PROBE_DUE_NS if waits else None

    def unanswered(self, now_ns: int) -> bool:
        """Whether a probe is under way that should have been answered by now."""
        return self._expected and self._probe_until_ns is not None and now_ns >= self._probe_until_ns

    def sent(self, now_ns: int, predicted_ms: float | None = None) -> None:
        """A request went to the replica: in HALF_OPEN it is the probe.

        ``predicted_ms`` until its first byte; ``None`` where nothing can be expected.
        """
        if self.state is BreakerState.HALF_OPEN:
            self._expected = predicted_ms is not None
            self._probe_until_ns = now_ns + max(self._eject_ns, round(min(predicted_ms or 0.0, PREDICTED_MS_MAX) * 1e6))
            self._probed_ns = now_ns

    def withdrawn(self) -> None:
        """A request left without a verdict: its client is gone, or the replica drains."""
        self._probe_until_ns = None

    def count_failure(self, fingerprint: int, config: FaultsConfig) -> bool:
        """Count a failure while CLOSED; whether that is one too many."""
        if fingerprint:
            self._fingerprints.add(fingerprint)
        else:
            self._nameless += 1
        return self.failures >= config.breaker_failures

    def count_answer(self) -> None:
        """An answer while CLOSED ends the row of failures."""
        if self._nameless or self._fingerprints:
            self._fingerprints.clear()
            self._nameless = 0

    def passed(self, config: FaultsConfig, now_ns: int) -> bool:
        """The probe was answered; whether the replica counts again with that."""
        if not self.probing:
            return False
        self._probe_until_ns = None
        self._passed += 1
        if self._passed < config.probation_requests:
            return False
        self.close(now_ns)
        return True

    def close(self, now_ns: int) -> None:
        """The replica takes requests like all others."""
        self.state, self.code, self.text = BreakerState.CLOSED, "", ""
        self._closed_ns = now_ns
        self._probe_until_ns = None
        self.count_answer()

    def open(
        self, code: str, text: str, config: FaultsConfig, now_ns: int, rng: random.Random, *, alone: bool = False
    ) -> None:
        """Leave the replica alone, longer than the last time unless it has worked since.

        ``alone``: it was the last one that took requests, or on probation while none did.
        """
        if self._eject_ns:
            worked = self._closed_ns is not None and now_ns - self._closed_ns > self._eject_ns
            self._doublings = 0 if worked else min(DOUBLINGS_MAX, self._doublings + (not alone))
        self.state, self.code, self.text = BreakerState.OPEN, code, text
        self._closed_ns = None
        self._probe_until_ns = None
        ms = min(config.eject_ms_max, config.eject_ms * 2**self._doublings)
        self._eject_ns = round(ms * 1e6 * (1 - JITTER_SHARE * rng.random()))
        self._reopen_ns = now_ns + self._eject_ns
        self.count_answer()
