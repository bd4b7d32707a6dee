"""The gateway's own load per replica, exact, in requests and tokens, counted from dispatch on.

One entry per request id: waiting for its first byte (its uncached prompt tokens are prefill backlog) or past it (its
prompt is KV held while it decodes). Whoever raised an entry gives it back by request id; doing so twice changes
nothing. The book holds as many entries as admission lets requests in, and nothing of a replica without open requests.

It must not know replicas' samples: what engines say is joined with these counts in :mod:`policies.routing.predict`.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.types import ReplicaId


@dataclass(slots=True)
class _Entry:
    replica_id: ReplicaId
    uncached_tokens: int
    prompt_tokens: int
    first_byte: bool = False


@dataclass(slots=True)
class _Load:
    requests: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


class LoadBook:
    """Open requests by id and their sums by replica."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._loads: dict[ReplicaId, _Load] = {}

    def dispatched(self, replica_id: ReplicaId, request_id: str, uncached_tokens: int, prompt_tokens: int) -> None:
        """Count a request sent to ``replica_id``; one that was counted elsewhere before (a retry) moves.

        Raises ``ValueError`` for negative token counts, before anything is changed.
        """
        if uncached_tokens < 0 or prompt_tokens < 0:
            raise ValueError(f"token counts must not be negative: {uncached_tokens} uncached of {prompt_tokens}")
        self.released(request_id)
        self._entries[request_id] = _Entry(replica_id, uncached_tokens, prompt_tokens)
        load = self._loads.setdefault(replica_id, _Load())
        load.requests += 1
        load.prefill_tokens += uncached_tokens

    def first_byte(self, request_id: str) -> None:
        """Prefill of the request is over; unknown ids and repeated calls change nothing."""
        entry = self._entries.get(request_id)
        if entry is None or entry.first_byte:
            return
        entry.first_byte = True
        load = self._loads[entry.replica_id]
        load.prefill_tokens -= entry.uncached_tokens
        load.decode_tokens += entry.prompt_tokens

    def released(self, request_id: str) -> None:
        """Give back all a request holds; unknown ids change nothing."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        load = self._loads[entry.replica_id]
        load.requests -= 1
        if entry.first_byte:
            load.decode_tokens -= entry.prompt_tokens
        else:
            load.prefill_tokens -= entry.uncached_tokens
        if load.requests == 0:
            del self._loads[entry.replica_id]

    def forget(self, replica_id: ReplicaId) -> None:
        """Drop a replica that left, with its open requests; their later release changes nothing."""
        if self._loads.pop(replica_id, None) is None:
            return
        for request_id in [r for r, e in self._entries.items() if e.replica_id == replica_id]:
            del self._entries[request_id]

    def requests(self, replica_id: ReplicaId) -> int:
        """Open requests at a replica."""
        load = self._loads.get(replica_id)
        return load.requests if load else 0

    def prefill_tokens(self, replica_id: ReplicaId) -> int:
        """Uncached prompt tokens of requests still without a first byte."""
        load = self._loads.get(replica_id)
        return load.prefill_tokens if load else 0

    def decode_tokens(self, replica_id: ReplicaId) -> int:
        """Prompt tokens of streams past their first byte (a lower estimate of the KV they hold)."""
        load = self._loads.get(replica_id)
        return load.decode_tokens if load else 0

    @property
    def inflight(self) -> int:
        """Open requests at all replicas."""
        return len(self._entries)
