"""Whether an idle replica that looks slow should be tried again.

A replica that was slow for a while learns it; when it is quick again it learns nothing, because nobody asks it:
at low load the quick ones take all. So a replica without a request for :data:`IDLE_S`, whose prefill looks
:data:`SLOW_FACTOR` times as slow as the quickest one's, gets the next request that it would still serve within
:data:`TTFT_SHARE` of the TTFT objective, and then none for as long again. A replica that really is slow costs one such
request now and then.

What this must not do: touch replicas that look as quick as others (an idle fleet keeps its prefixes together).
"""

from __future__ import annotations

from dataclasses import replace

from policies.config import ObjectivesConfig
from policies.routing.board import PROMPT_TOKENS, Board
from policies.types import Reason, ReplicaId, Request, RouteChoice

IDLE_S = 30.0
LOOK_S = 1.0
"""Time between two looks at the fleet."""
SLOW_FACTOR = 1.5
TTFT_SHARE = 0.5


class Explorer:
    """One per gateway. Bounded by membership."""

    def __init__(self, objectives: ObjectivesConfig) -> None:
        self._busy_ns: dict[ReplicaId, int] = {}
        """When each replica last had a request, as far as looks saw."""
        self._look_ns = 0
        self.reconfigure(objectives)

    def reconfigure(self, objectives: ObjectivesConfig) -> None:
        """Steer by ``objectives`` from now on."""
        self._ttft_ms_max = TTFT_SHARE * objectives.ttft_ms

    def with_trial(self, choice: RouteChoice, request: Request, board: Board, now_ns: int) -> RouteChoice:
        """``choice`` with a replica before all others that should be tried again, if there is one."""
        if now_ns < self._look_ns or not choice.tiers:
            return choice
        self._look_ns = now_ns + round(LOOK_S * 1e9)
        replica_id = self._candidate(board, now_ns)
        if replica_id is None or replica_id == choice.order[0]:
            return choice
        ttft_ms = board.standings[replica_id].ttft_ms(request.prompt_tokens)
        if ttft_ms > self._ttft_ms_max:
            return choice
        self._busy_ns[replica_id] = now_ns
        text = f"{replica_id} looked slow and had no request for {IDLE_S:g} s: is it still? Else: {choice.reason.text}"
        led = choice.led_by(replica_id, Reason("trial", text))
        return replace(led, predicted_ttft_ms={**choice.predicted_ttft_ms, replica_id: ttft_ms})

    def _candidate(self, board: Board, now_ns: int) -> ReplicaId | None:
        """The one that was idle for longest of those that look slow."""
        standings = board.standings
        known = self._busy_ns
        self._busy_ns = {r: now_ns if s.requests else known.get(r, now_ns) for r, s in standings.items()}
        since_ns = now_ns - round(IDLE_S * 1e9)
        idle = [r for r, busy_ns in self._busy_ns.items() if busy_ns <= since_ns]
        if not idle:
            return None
        slow_ms = SLOW_FACTOR * min(s.own_ms(PROMPT_TOKENS) for s in standings.values())
        slow = [r for r in idle if standings[r].own_ms(PROMPT_TOKENS) > slow_ms]
        return min(slow, key=lambda r: (self._busy_ns[r], r), default=None)
