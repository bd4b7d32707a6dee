"""What a fleet can still take, for admission: how soon it would begin with a request, and how much it serves.

    ready            replicas among those with the least TTFT where the wait, predicted TTFT minus the request's own
                     prefill, is at most a limit
                     There is no room where one more stream would make the gaps of all too long: above the share of
                     the objective that routing allows (policies/routing/lateness.py), or twice those of an idle
                     engine where that is more. Room that nobody is sent to is none.
    idle_ttft_ms     prefill of the prompt alone, on the fastest kind of replica
    tokens_per_s     sum over replicas of (p + w*o) / (d*p + o * step_ms(n) / n), for requests of p prompt and o output
                     tokens in a batch of n; w is the weight of an output token

What this must not do: decide who gets in.
"""

from __future__ import annotations

from policies.config import ObjectivesConfig
from policies.routing.fleet import Fleet
from policies.routing.lateness import DECODE_SHARE
from policies.routing.predict import Standing

LOOKED_AT = 4
"""Replicas with the least TTFT that are looked at for the least wait."""

BATCH_MAX = 64
"""Largest batch assumed of a replica that has not told its own."""

SLOWED_MAX = 2.0
"""An engine whose gaps miss the objective even when idle takes requests until they are so many times as long."""

KINDS_MAX = 32
"""Replicas whose throughput is computed; that of the others is taken to be alike."""


class FleetCapacity:
    """See the module; all answers are of now, ``None`` where no replica takes requests."""

    def __init__(self, fleet: Fleet, objectives: ObjectivesConfig) -> None:
        self._fleet = fleet
        self.reconfigure(objectives)

    def reconfigure(self, objectives: ObjectivesConfig) -> None:
        """Steer by ``objectives`` from now on."""
        self._gap_ms_max = objectives.itl_ms * DECODE_SHARE

    @property
    def own_requests(self) -> int:
        """Requests of this gateway at replicas."""
        return self._fleet.own_requests

    def replicas(self, now_ns: int) -> int:
        """Replicas that take requests."""
        return len(self._fleet.board(now_ns).standings)

    def ready(self, prompt_tokens: int, wait_ms_max: float, count: int, now_ns: int) -> int:
        """How many of ``count`` replicas would begin with such a prompt within ``wait_ms_max``."""
        found = 0
        for standing in self._best(max(count, LOOKED_AT), now_ns):
            if self._is_quick(standing) and standing.wait_ms(prompt_tokens) <= wait_ms_max:
                found += 1
                if found == count:
                    break
        return found

    def slots(self, now_ns: int) -> tuple[int, int] | None:
        """Sequences the fleet may run, and how many more it may now; ``None`` while a replica has not told."""
        return self._fleet.board(now_ns).slots

    def idle_ttft_ms(self, prompt_tokens: int, now_ns: int) -> float | None:
        """TTFT of such a prompt where nothing else runs."""
        best = self._best(LOOKED_AT, now_ns)
        return min(s.own_ms(prompt_tokens) for s in best) if best else None

    def gap_ms(self, now_ns: int) -> float | None:
        """Gap between tokens of a stream on the replica that is best now."""
        best = self._best(LOOKED_AT, now_ns)
        return min(s.gap_ms(0) for s in best) if best else None

    def tokens_per_s(self, prompt_tokens: float, output_tokens: float, output_weight: float, now_ns: int) -> float:
        """Weighted tokens per second of the whole fleet, by its step models alone; 0 without replicas."""
        standings = self._fleet.board(now_ns).standings
        some = [standings[r] for r, _ in zip(standings, range(KINDS_MAX), strict=False)]
        if not some:
            return 0.0
        cost = prompt_tokens + output_weight * output_tokens
        total = sum(cost * 1_000 / s.service_ms(prompt_tokens, output_tokens, BATCH_MAX) for s in some)
        return total * len(standings) / len(some)

    def _is_quick(self, standing: Standing) -> bool:
        """Whether streams there keep their pace."""
        return standing.gap_ms(0) <= max(self._gap_ms_max, SLOWED_MAX * standing.idle_gap_ms)

    def _best(self, count: int, now_ns: int) -> list[Standing]:
        """Those with the least TTFT that streams may go to; all of them where there is no such."""
        board = self._fleet.board(now_ns)
        best = [board.standings[r] for r in board.by_ttft.least(count, 0.0, ())]
        return [s for s in best if self._is_quick(s)] or best
