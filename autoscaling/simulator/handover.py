"""From prefill to decode in a split fleet: pick a decode replica, move the KV cache, go on there.

    transfer_ms = prompt_tokens * kv_bytes_per_token / kv_transfer_gb_s        (0 where the speed is not known)

The replica that holds, or was promised, the fewest prompt tokens takes the request. That is a stand-in: the live system
has no rule for this yet. Transfers do not slow each other down. With no decode replica, requests wait for one; one that
cannot take the request any more when its KV is there is passed over. As in vLLM the decode replica computes the last
prompt token again, so the client's first byte comes from there.

What this must not do: choose the prefill replica; the gateway's policies do.
"""

from __future__ import annotations

from collections import deque

from autoscaling.simulator.context import Attempt, Context
from autoscaling.simulator.replica import Phase, Replica
from autoscaling.simulator.serve import PoolServe

LOOK_NS = 1_000_000_000
"""Period at which those that wait are tried again, whatever happens."""


class Handover:
    """See the module. Connects the two pools on construction."""

    def __init__(self, ctx: Context, prefill: PoolServe, decode: PoolServe) -> None:
        self._ctx = ctx
        self._decode = decode
        self._profile = prefill.pool.profile
        self._line: deque[Attempt] = deque()
        self._looking = False
        prefill.on_prefilled = self.hand_over
        decode.on_room = self._on_room
        decode.on_members = self._on_members
        decode.queued = self._line.__len__

    def hand_over(self, attempt: Attempt, now_ns: int) -> None:
        """Prefill is done: find a decode replica."""
        self._ctx.counters["handovers"] += 1
        attempt.where, attempt.prefill_job = None, attempt.job
        self._place(attempt, now_ns)

    def _place(self, attempt: Attempt, now_ns: int) -> None:
        if attempt.over or attempt.aborted:
            return
        replica = self._pick(now_ns)
        if replica is None:
            self._line.append(attempt)
            self._look_later(now_ns)
            return
        replica.promise(attempt)
        took_ns = self._transfer_ns(attempt.call.request.prompt_tokens)
        self._ctx.queue.at(now_ns + took_ns, self._on_moved, (attempt, replica))

    def _transfer_ns(self, tokens: int) -> int:
        gb_s = self._profile.kv_transfer_gb_s
        return round(tokens * self._profile.kv_bytes_per_token / gb_s) if gb_s > 0 else 0

    def _pick(self, now_ns: int) -> Replica | None:
        most = self._decode.pool.ongoing_max
        ready = [
            r
            for r in self._decode.of_phase(Phase.READY)
            if now_ns >= r.refuses_until_ns and (most is None or r.slots_used < most)
        ]
        return min(ready, key=lambda r: (r.promised_tokens, r.slots_used), default=None)

    def _on_moved(self, now_ns: int, move: tuple[Attempt, Replica]) -> None:
        attempt, replica = move
        if not replica.receive_kv(now_ns, attempt):
            self._place(attempt, now_ns)
            self._on_room(now_ns)

    def _look_later(self, now_ns: int) -> None:
        if not self._looking:
            self._looking = True
            self._ctx.queue.at(now_ns + LOOK_NS, self._on_look)

    def _on_look(self, now_ns: int, _: object) -> None:
        self._looking = False
        self._on_room(now_ns)
        if self._line:
            self._look_later(now_ns)

    def _on_members(self, members: tuple[str, ...], now_ns: int) -> None:  # noqa: ARG002 - Serve's callback
        self._on_room(now_ns)

    def _on_room(self, now_ns: int) -> None:
        """Place those that wait, as far as there is room; the rest keep their order."""
        for _ in range(len(self._line)):
            if self._pick(now_ns) is None:
                return
            self._place(self._line.popleft(), now_ns)
