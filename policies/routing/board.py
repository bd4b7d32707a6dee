"""What the live router reads instead of a view per replica: the standings of all available replicas, kept current.

Beside the standings themselves: sums for the mean load, the ring, and two rough orders to find candidates by: TTFT of
a prompt of :data:`PROMPT_TOKENS`, and load among the replicas of one kind (about equally fast at prefill: in a mixed
fleet the least loaded fast one is neither the least loaded nor, behind its queue, the fastest).

Only what changed is touched, so that a choice in a fleet of a thousand costs what one in a fleet of twenty does.

What this must not do: know samples or their age (the fleet does), or rank.
"""

from __future__ import annotations

from collections.abc import Iterable

from policies.routing.buckets import Buckets
from policies.routing.predict import Standing, load_tokens
from policies.routing.rendezvous import Ring
from policies.types import ReplicaId

PROMPT_TOKENS = 2_048.0
"""Uncached prompt whose TTFT replicas are kept in order by."""


class Board:
    """Standings of the replicas that may take requests."""

    def __init__(self) -> None:
        self.standings: dict[ReplicaId, Standing] = {}
        """By replica; unavailable ones are absent."""
        self.by_ttft = Buckets()
        self.by_load: dict[int, Buckets] = {}
        """By kind, see :attr:`policies.routing.predict.Standing.kind`."""
        self.ring = Ring()
        """All members, the unavailable ones included."""
        self._requests = 0
        self._prefill_tokens = 0
        self._kv_tokens = 0
        self._kv_tokens_max = 0
        self._kv_unknown = 0
        self._slots = 0
        self._slots_free = 0
        self._slots_unknown = 0

    def put(self, replica_id: ReplicaId, standing: Standing | None) -> None:
        """The replica stands like this from now on; ``None``: it takes no requests."""
        old = self.standings.get(replica_id)
        if old is not None:
            self._requests -= old.requests
            self._prefill_tokens -= old.prefill_tokens
            self._kv_tokens -= old.kv_tokens
            self._kv_tokens_max -= old.kv_tokens_max or 0
            self._kv_unknown -= not old.kv_tokens_max
            self._slots -= old.slots
            self._slots_free -= old.slots_free
            self._slots_unknown -= not old.slots
            if standing is None or standing.kind != old.kind:
                self._leave_kind(replica_id, old.kind)
        if standing is None:
            if old is not None:
                del self.standings[replica_id]
                self.by_ttft.drop(replica_id)
            return
        self.standings[replica_id] = standing
        self._requests += standing.requests
        self._prefill_tokens += standing.prefill_tokens
        self._kv_tokens += standing.kv_tokens
        self._kv_tokens_max += standing.kv_tokens_max or 0
        self._kv_unknown += not standing.kv_tokens_max
        self._slots += standing.slots
        self._slots_free += standing.slots_free
        self._slots_unknown += not standing.slots
        self.by_ttft.put(replica_id, standing.ttft_ms(PROMPT_TOKENS))
        by_load = self.by_load.get(standing.kind)
        if by_load is None:
            by_load = self.by_load[standing.kind] = Buckets()
        by_load.put(replica_id, standing.load_tokens)

    def _leave_kind(self, replica_id: ReplicaId, kind: int) -> None:
        by_load = self.by_load[kind]
        by_load.drop(replica_id)
        if not by_load:
            del self.by_load[kind]

    @property
    def kv_tokens_max(self) -> int | None:
        """KV cache of all replicas together; ``None`` while one has not told its own."""
        return None if self._kv_unknown else self._kv_tokens_max

    @property
    def slots(self) -> tuple[int, int] | None:
        """Sequences all replicas together may run, and how many more they may now; ``None`` while one has not told."""
        return None if self._slots_unknown else (self._slots, self._slots_free)

    @property
    def requests(self) -> int:
        """Open requests at all replicas, other gateways' as far as samples tell."""
        return self._requests

    def mean_load_tokens(self, without: Iterable[Standing]) -> float:
        """Mean load of the replicas but those in ``without``; 0 where nobody is left. Sums are of integers: exact."""
        requests, prefill_tokens, kv_tokens = self._requests, self._prefill_tokens, self._kv_tokens
        n = len(self.standings)
        for s in without:
            requests -= s.requests
            prefill_tokens -= s.prefill_tokens
            kv_tokens -= s.kv_tokens
            n -= 1
        return load_tokens(requests, prefill_tokens, kv_tokens) / n if n > 0 else 0.0
