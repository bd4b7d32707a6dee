"""Ranks the replicas for one request by the TTFT predicted for each (see :mod:`policies.routing.predict`).

1. Skip what is unavailable. Nobody left: an empty choice, with the reason.
2. Predict, and rank by cost: TTFT plus a share of the computation, which those that come later wait for
   (``WORK_WEIGHT``). Replicas within ``TIE_SHARE`` of the TTFT (at least ``TIE_MS_MIN``) of the least cost are equals:
   a prediction is no better than that. Equals are ordered by least uncached prompt tokens (the fleet's work), then by
   rendezvous hashing of the prompt's first block, so that several gateways send a prefix that nobody holds to the same
   replica without talking. Where somebody holds some of it, or the prompt is too short for a block, there is nothing to
   agree on: equals go by least load.
3. Bounded load: a replica whose load is above ``load_bound * mean + slack`` goes behind all others, never away; all
   others keep their affinity. ``slack`` is ``load_slack_tokens``, or the load of one stream like the request where that
   is more (a single long stream is no hot spot). Not counted is backlog that may be the computation of the request's
   own prefix (``min(hit_tokens, backlog)``): a burst of one cold prefix follows its first instead of computing it
   everywhere.

4. The promise: replicas that would serve the request within the objectives go first; where nobody would, those that are
   late already (see :mod:`policies.routing.lateness`).

A tier holds one replica each, because the order within it matters. ``strategy="random"`` shuffles: a baseline.

Large fleets are ranked by a shortlist (see :mod:`policies.routing.shortlist`), small ones whole; ranking is the same.

What this must not do: count load (the flow does, at dispatch), keep replicas' state, or drop a replica for its load.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from random import Random
from typing import TypeAlias

from policies.config import ObjectivesConfig, RoutingConfig
from policies.routing.board import Board
from policies.routing.fleet import Fleet
from policies.routing.lateness import Promise, by_promise, promise
from policies.routing.predict import Estimate, Standing, estimate_at, load_tokens, standing_of
from policies.routing.prefix_index import Levels, PrefixIndex, hit_blocks
from policies.routing.rendezvous import score, text_key
from policies.routing.shortlist import SIZE, TIE_MS_MIN, TIE_SHARE, Shortlist, make_shortlist
from policies.types import Reason, ReplicaId, ReplicaView, Request, RouteChoice

OWN_SHARE_SMOOTHING = 0.01
"""Weight of the newest choice in a gateway's share of the fleet's requests."""

NAMED_MAX = 8
"""Replicas named where nobody is available."""


_Rank: TypeAlias = tuple[float, float, float, int, ReplicaId]
"""TTFT (0 for equals), uncached tokens, load where it decides, place among the homes."""


class Router:
    """Chooses replicas and remembers which prefixes were sent where."""

    def __init__(
        self, config: RoutingConfig, index: PrefixIndex, rng: Random, objectives: ObjectivesConfig | None = None
    ) -> None:
        self._config = config
        self._own_share = 1.0
        """Smoothed share of the fleet's open requests that are this gateway's."""
        self._promise: Promise | None = None
        self.load_bound: float | None = None
        """Of the plan in force, in place of the configured one; ``None``: there is none."""
        self._index = index
        self._rng = rng
        if objectives is not None:
            self.reconfigure(objectives)

    def reconfigure(self, objectives: ObjectivesConfig) -> None:
        """Steer by ``objectives`` from now on."""
        late_ms_max = self._config.late_ms_max
        self._promise = promise(objectives, late_ms_max) if late_ms_max > 0 else None

    def choose(
        self,
        request: Request,
        views: Sequence[ReplicaView],
        strength: float | None,
        now_ns: int,  # noqa: ARG002 - views carry their ages already; a decision takes its time as an argument, always
    ) -> RouteChoice:
        """Order all ``views`` for ``request``, best first: what :meth:`choose_among` is measured against.

        ``strength`` is the plan's trust in prefix hits in [0, 1] (values outside are clamped); ``None`` takes the
        configured one. Predictions are in ms and tokens, for every available replica.
        """
        standings = {v.replica_id: standing_of(v, self._config) for v in views if v.available}
        if not standings:
            return _nobody(views)
        mean = math.fsum(s.load_tokens for s in standings.values()) / len(standings)
        levels = self._index.levels(self._indexed(request))
        return self._choose(request, Shortlist(standings), levels, strength, mean)

    def choose_among(
        self, request: Request, fleet: Fleet, exclude: Collection[ReplicaId], strength: float | None, now_ns: int
    ) -> RouteChoice:
        """Order the replicas of ``fleet`` without ``exclude``, best first, from a shortlist where they are many.

        The choice is :meth:`choose`'s for fleets of up to :data:`policies.routing.shortlist.SIZE`. Beyond, it has that
        many replicas, and fewer only where fewer are available.
        """
        board = fleet.board(now_ns)
        self._bound_belief(request, fleet, board)
        levels = self._index.levels(self._indexed(request))
        shortlist = make_shortlist(request, fleet, board, exclude, self._index, levels, self._rng, now_ns)
        if not shortlist.standings:
            return _nobody(fleet.views(now_ns, exclude))
        mean = board.mean_load_tokens([s for r in exclude if (s := board.standings.get(r)) is not None])
        return self._choose(request, shortlist, levels, strength, mean)

    def dispatched(self, request: Request, replica_id: ReplicaId) -> None:
        """Believe from now on that ``replica_id`` holds the request's prefix: a burst of it follows its first."""
        self._index.add(self._indexed(request), replica_id)

    def held_blocks(self, request: Request, replica_id: ReplicaId) -> int:
        """Leading blocks of ``request`` that ``replica_id`` is believed to hold."""
        return self._index.held(self._indexed(request), replica_id)

    def computed(self, request: Request, replica_id: ReplicaId) -> None:
        """Believe it again where a request that shares the prefix failed, and took the belief with it."""
        blocks = self._indexed(request)
        if self._index.held(blocks, replica_id) < len(blocks):
            self._index.add(blocks, replica_id)

    def not_computed(self, request: Request, replica_id: ReplicaId, held_blocks: int) -> None:
        """Believe no more that ``replica_id`` holds what it was to compute for ``request``."""
        self._index.withdraw(self._indexed(request)[held_blocks:], replica_id)

    def forget(self, replica_id: ReplicaId) -> None:
        """Drop what a replica that left was believed to hold."""
        self._index.remove_replica(replica_id)

    def _bound_belief(self, request: Request, fleet: Fleet, board: Board) -> None:
        """Believe in no more blocks than this gateway's share of all KV caches holds: what is older was evicted."""
        kv_tokens_max = board.kv_tokens_max
        if kv_tokens_max is None:
            self._index.blocks_bound = None
            return
        if board.requests:
            own = min(1.0, fleet.own_requests / board.requests)
            self._own_share += OWN_SHARE_SMOOTHING * (own - self._own_share)
        self._index.blocks_bound = int(kv_tokens_max * self._own_share / request.block_tokens)

    def _indexed(self, request: Request) -> Sequence[int]:
        return request.blocks[: self._config.request_blocks_max]

    def _choose(
        self,
        request: Request,
        shortlist: Shortlist,
        levels: Levels,
        strength: float | None,
        mean_load_tokens: float,
    ) -> RouteChoice:
        trust = self._config.affinity_strength if strength is None or math.isnan(strength) else strength
        estimates = self._estimates(request, shortlist.standings, levels, min(1.0, max(0.0, trust)))
        if self._config.strategy == "random":
            order = list(estimates)
            self._rng.shuffle(order)
            reason = Reason("random", f"any of {len(order)} replicas, {_words(order, estimates, request)}")
        else:
            order, reason = self._rank(request, estimates, shortlist, mean_load_tokens)
        return RouteChoice(
            tuple([(r,) for r in order]),
            reason,
            {r: e.ttft_ms for r, e in estimates.items()},
            {r: e.hit_tokens for r, e in estimates.items()},
        )

    def _estimates(
        self, request: Request, standings: Mapping[ReplicaId, Standing], levels: Levels, trust: float
    ) -> dict[ReplicaId, Estimate]:
        if not levels:
            return {r: estimate_at(request, s, 0, trust) for r, s in standings.items()}
        bit = self._index.bit
        return {r: estimate_at(request, s, hit_blocks(levels, bit(r)), trust) for r, s in standings.items()}

    def _rank(
        self,
        request: Request,
        estimates: Mapping[ReplicaId, Estimate],
        shortlist: Shortlist,
        mean_load_tokens: float,
    ) -> tuple[list[ReplicaId], Reason]:
        least_ms, ttft_ms = min([(e.cost_ms, e.ttft_ms) for e in estimates.values()])
        order = _order(request, estimates, shortlist.homes, least_ms + max(TIE_MS_MIN, TIE_SHARE * ttft_ms))
        preferred = order[0]
        bound = self._load_bound(request, mean_load_tokens)
        behind = [r for r in order if estimates[r].bounded_tokens > bound]
        if behind:
            order = [r for r in order if r not in behind] + behind
        bounded, nobody_in_time = order[0], False
        if self._promise is not None:
            order, nobody_in_time = by_promise(self._promise, request, order, estimates, shortlist.standings)
        words = _words(order, estimates, request)
        if len(order) == 1:
            return order, Reason("only_replica", words)
        if nobody_in_time:
            return order, Reason("late", f"{words}; nobody can serve it in time: it joins those that are late there")
        if order[0] != bounded:
            words += f"; {bounded} passed over: there it would be late, or make streams slow"
            return order, Reason("in_time", words)
        if order[0] != preferred:
            over = estimates[preferred].bounded_tokens
            words += f"; {preferred} passed over: its load of {over:,.0f} tokens is above the bound of {bound:,.0f}"
            return order, Reason("load_bound", words)
        if estimates[order[0]].hit_tokens:
            return order, Reason("prefix_hit", words)
        if request.blocks and not any(e.hit_tokens for e in estimates.values()):
            return order, Reason("cold_rendezvous", words)
        return order, Reason("least_ttft", words)

    def _load_bound(self, request: Request, mean_load_tokens: float) -> float:
        one_stream = load_tokens(1, 0, request.prompt_tokens)
        planned = self.load_bound
        bound = self._config.load_bound if planned is None or math.isnan(planned) else max(1.0, planned)
        return bound * mean_load_tokens + max(self._config.load_slack_tokens, one_stream)


def _order(
    request: Request, estimates: Mapping[ReplicaId, Estimate], homes: Sequence[ReplicaId] | None, equal_ms_max: float
) -> list[ReplicaId]:
    """Best first: those within ``equal_ms_max`` as equals, the rest by TTFT."""
    by_load = not request.blocks or any(e.hit_tokens for e in estimates.values())
    ranks = [
        (
            0.0 if e.cost_ms <= equal_ms_max else e.cost_ms,
            e.uncached_tokens,
            e.load_tokens if by_load else 0.0,
            homes.index(r) if homes and r in homes else SIZE,
            r,
        )
        for r, e in estimates.items()
    ]
    if homes is None:
        key = request.blocks[0] if request.blocks else text_key(request.request_id)
        return [rank[-1] for rank in _weighed(sorted(ranks), key)]
    return [rank[-1] for rank in sorted(ranks)]


def _weighed(ranks: list[_Rank], key: int) -> list[_Rank]:
    """Sorted ranks, with equals by their weight for ``key``."""
    begin = 0
    for end in range(1, len(ranks) + 1):
        if end == len(ranks) or ranks[end][:4] != ranks[begin][:4]:
            if end - begin > 1:
                ranks[begin:end] = sorted(ranks[begin:end], key=lambda rank: -score(key, rank[-1]))
            begin = end
    return ranks


def _words(order: Sequence[ReplicaId], estimates: Mapping[ReplicaId, Estimate], request: Request) -> str:
    """The choice in words, e.g. ``predicted 83 ms, 1,024 of 1,200 prompt tokens cached; runner-up 410 ms``."""
    first = estimates[order[0]]
    text = f"predicted {first.ttft_ms:,.0f} ms, {first.hit_tokens:,} of {request.prompt_tokens:,} prompt tokens cached"
    return f"{text}; runner-up {estimates[order[1]].ttft_ms:,.0f} ms" if len(order) > 1 else text


def _nobody(views: Sequence[ReplicaView]) -> RouteChoice:
    """The empty choice, and what is wrong with the first :data:`NAMED_MAX` replicas."""
    words = [f"{v.replica_id} {v.unavailable_reason or 'unavailable'}" for v in views[:NAMED_MAX]]
    if len(views) > NAMED_MAX:
        words.append(f"and {len(views) - NAMED_MAX:,} more")
    return RouteChoice((), Reason("none_available", ", ".join(words) or "no replica is known"), {}, {})
