"""Ranks the replicas for one request by the TTFT predicted for each (see :mod:`policies.routing.predict`).

1. Skip what is unavailable. Nobody left: an empty choice, with the reason.
2. Predict. Replicas within :data:`TIE_SHARE` (at least :data:`TIE_MS_MIN`) of the least TTFT are equals: a prediction
   is no better than that. Equals are ordered by least uncached prompt tokens (the fleet's work), then by rendezvous
   hashing of the prompt's first block, so that several gateways send a prefix that nobody holds to the same replica
   without talking. Prompts too short for a block have no prefix to keep together: equals go by least load.
3. Bounded load: a replica whose load is above ``load_bound * mean + slack`` goes behind all others, never away; all
   others keep their affinity. ``slack`` is ``load_slack_tokens``, or the load of one stream like the request where that
   is more (a single long stream is no hot spot). Not counted is backlog that may be the computation of the request's
   own prefix (``min(hit_tokens, backlog)``): a burst of one cold prefix follows its first instead of computing it
   everywhere.

A tier holds one replica each, because the order within it matters. ``strategy="random"`` shuffles: a baseline.

What this must not do: count load (the flow does, at dispatch), keep replicas' state, or drop a replica for its load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random

from policies.config import RoutingConfig
from policies.routing.predict import Estimate, Load, estimate
from policies.routing.prefix_index import PrefixIndex
from policies.routing.rendezvous import score, text_key
from policies.types import Reason, ReplicaId, ReplicaView, Request, RouteChoice

TIE_SHARE = 0.1
"""Predictions within this share of the least are equal."""

TIE_MS_MIN = 5.0
"""Predictions within this many ms of the least are equal, however short."""


class Router:
    """Chooses replicas and remembers which prefixes were sent where."""

    def __init__(self, config: RoutingConfig, index: PrefixIndex, rng: Random) -> None:
        self._config = config
        self._index = index
        self._rng = rng

    def choose(
        self,
        request: Request,
        views: Sequence[ReplicaView],
        strength: float | None,
        now_ns: int,  # noqa: ARG002 - views carry their ages already; a decision takes its time as an argument, always
    ) -> RouteChoice:
        """Order ``views`` for ``request``, best first.

        ``strength`` is the plan's trust in prefix hits in [0, 1] (values outside are clamped); ``None`` takes the
        configured one. Predictions are in ms and tokens, for every available replica.
        """
        available = [v for v in views if v.available]
        if not available:
            return RouteChoice((), Reason("none_available", _why_nobody(views)), {}, {})
        hits = self._index.hit_blocks(self._indexed(request))
        trust = self._config.affinity_strength if strength is None or math.isnan(strength) else strength
        trust = min(1.0, max(0.0, trust))
        estimates = {
            v.replica_id: estimate(request, v, hits.get(v.replica_id, 0), trust, self._config) for v in available
        }
        if self._config.strategy == "random":
            order = list(estimates)
            self._rng.shuffle(order)
            reason = Reason("random", f"any of {len(order)} replicas, {_words(order, estimates, request)}")
        else:
            order, reason = self._rank(request, estimates)
        return RouteChoice(
            tuple((r,) for r in order),
            reason,
            {r: e.ttft_ms for r, e in estimates.items()},
            {r: e.hit_tokens for r, e in estimates.items()},
        )

    def dispatched(self, request: Request, replica_id: ReplicaId) -> None:
        """Believe from now on that ``replica_id`` holds the request's prefix: a burst of it follows its first."""
        self._index.add(self._indexed(request), replica_id)

    def forget(self, replica_id: ReplicaId) -> None:
        """Drop what a replica that left was believed to hold."""
        self._index.remove_replica(replica_id)

    def _indexed(self, request: Request) -> Sequence[int]:
        return request.blocks[: self._config.request_blocks_max]

    def _rank(self, request: Request, estimates: Mapping[ReplicaId, Estimate]) -> tuple[list[ReplicaId], Reason]:
        least_ms = min(e.ttft_ms for e in estimates.values())
        order = _order(request, estimates, least_ms + max(TIE_MS_MIN, TIE_SHARE * least_ms))
        preferred = order[0]
        bound = self._load_bound(request, estimates)
        order.sort(key=lambda r: estimates[r].bounded_tokens > bound)
        words = _words(order, estimates, request)
        if len(order) == 1:
            return order, Reason("only_replica", words)
        if order[0] != preferred:
            over = estimates[preferred].bounded_tokens
            words += f"; {preferred} passed over: its load of {over:,.0f} tokens is above the bound of {bound:,.0f}"
            return order, Reason("load_bound", words)
        if estimates[order[0]].hit_tokens:
            return order, Reason("prefix_hit", words)
        if request.blocks and not any(e.hit_tokens for e in estimates.values()):
            return order, Reason("cold_rendezvous", words)
        return order, Reason("least_ttft", words)

    def _load_bound(self, request: Request, estimates: Mapping[ReplicaId, Estimate]) -> float:
        mean = math.fsum(e.load_tokens for e in estimates.values()) / len(estimates)
        one_stream = Load(1, 0, request.prompt_tokens).tokens
        return self._config.load_bound * mean + max(self._config.load_slack_tokens, one_stream)


def _order(request: Request, estimates: Mapping[ReplicaId, Estimate], equal_ms_max: float) -> list[ReplicaId]:
    """Best first: those within ``equal_ms_max`` as equals, the rest by TTFT."""
    key = request.blocks[0] if request.blocks else text_key(request.request_id)

    def rank(item: tuple[ReplicaId, Estimate]) -> tuple[float, float, float, int]:
        replica_id, e = item
        ttft_ms = 0.0 if e.ttft_ms <= equal_ms_max else e.ttft_ms
        load_tokens = 0.0 if request.blocks else e.load_tokens
        return ttft_ms, e.uncached_tokens, load_tokens, -score(key, replica_id)

    return [r for r, _ in sorted(estimates.items(), key=rank)]


def _words(order: Sequence[ReplicaId], estimates: Mapping[ReplicaId, Estimate], request: Request) -> str:
    """The choice in words, e.g. ``predicted 83 ms, 1,024 of 1,200 prompt tokens cached; runner-up 410 ms``."""
    first = estimates[order[0]]
    text = f"predicted {first.ttft_ms:,.0f} ms, {first.hit_tokens:,} of {request.prompt_tokens:,} prompt tokens cached"
    return f"{text}; runner-up {estimates[order[1]].ttft_ms:,.0f} ms" if len(order) > 1 else text


def _why_nobody(views: Sequence[ReplicaView]) -> str:
    if not views:
        return "no replica is known"
    return ", ".join(f"{v.replica_id} {v.unavailable_reason or 'unavailable'}" for v in views)
