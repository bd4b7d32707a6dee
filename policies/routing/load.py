"""The gateway's own load per replica, exact, in requests and tokens, counted from dispatch on.

One entry per request id: waiting for its first byte (its uncached prompt tokens are prefill backlog) or past it (its
prompt is KV held while it decodes). Whoever raised an entry gives it back by request id; doing so twice changes
nothing. The book holds as many entries as admission lets requests in, and nothing of a replica without open requests.

The book remembers whose counts changed until the fleet asks (:meth:`LoadBook.take_changed`), so that nothing is
computed anew for replicas where nothing happened.

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
        self._changed: dict[ReplicaId, None] = {}

    def dispatched(self, replica_id: ReplicaId, request_id: str, uncached_tokens: int, prompt_tokens: int) -> None:
        """Count a request sent to ``replica_id``; one that was counted elsewhere before (a retry) moves.

        Raises ``ValueError`` for negative token counts, before anything is changed.
        """
        if uncached_tokens < 0 or prompt_tokens < 0:
            raise ValueError(f"token counts must not be negative: {uncached_tokens} uncached of {prompt_tokens}")
        self.released(request_id)
        self._entries[request_id] = _Entry(replica_id, uncached_tokens, prompt_tokens)
        self._changed[replica_id] = None
        load = self._loads.get(replica_id)
        if load is None:
            load = self._loads[replica_id] = _Load()
        load.requests += 1
        load.prefill_tokens += uncached_tokens

    def first_byte(self, request_id: str) -> None:
        """Prefill of the request is over; unknown ids and repeated calls change nothing."""
        entry = self._entries.get(request_id)
        if entry is None or entry.first_byte:
            return
        entry.first_byte = True
        self._changed[entry.replica_id] = None
        load = self._loads[entry.replica_id]
        load.prefill_tokens -= entry.uncached_tokens
        load.decode_tokens += entry.prompt_tokens

    def released(self, request_id: str) -> None:
        """Give back all a request holds; unknown ids change nothing."""
        entry = self._entries.pop(request_id, None)
        if entry is None:
            return
        self._changed[entry.replica_id] = None
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
        self._changed[replica_id] = None
        for request_id in [r for r, e in self._entries.items() if e.replica_id == replica_id]:
            del self._entries[request_id]

    def take_changed(self) -> list[ReplicaId]:
        """Replicas whose counts changed since the last call, in order of their first change. For one caller: the
        fleet that joins these counts with samples.
        """
        changed = list(self._changed)
        self._changed.clear()
        return changed

    def counts(self, replica_id: ReplicaId) -> tuple[int, int, int]:
        """Open requests, prefill tokens and decode tokens of a replica, as below."""
        load = self._loads.get(replica_id)
        return (load.requests, load.prefill_tokens, load.decode_tokens) if load else (0, 0, 0)

    def requests(self, replica_id: ReplicaId) -> int:
        """Open requests at a replica."""
        return self.counts(replica_id)[0]

    def prefill_tokens(self, replica_id: ReplicaId) -> int:
        """Uncached prompt tokens of requests still without a first byte."""
        return self.counts(replica_id)[1]

    def decode_tokens(self, replica_id: ReplicaId) -> int:
        """Prompt tokens of streams past their first byte (a lower estimate of the KV they hold)."""
        return self.counts(replica_id)[2]

    @property
    def inflight(self) -> int:
        """Open requests at all replicas."""
        return len(self._entries)
