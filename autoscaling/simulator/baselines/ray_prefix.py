"""Ray Serve LLM's ``PrefixCacheAffinityRouter``.

Source: Ray 2.60, ``ray/llm/_internal/serve/routing_policies/prefix_aware/prefix_aware_router.py`` and
``prefix_tree.py`` (documented at docs.ray.io, "Prefix-aware routing"), with their defaults:

1. A pair by power of two choices is drawn: the fallback.
2. Where the longest and the shortest queue differ by more than ``imbalanced_threshold`` (default: infinity, so never),
   the fallback decides.
3. The prompt is matched against one tree that all routers share. Match rate, in characters, of at least
   ``match_rate_threshold`` (0.1): candidates are all replicas that were sent the whole matched prefix. Below it:
   candidates are the replicas with the fewest characters in the tree.
4. Of the candidates the one with the shortest queue, the first of equals.

``do_eviction`` is off by default: the tree never forgets, whatever engines evict. Switched on, every
``eviction_interval_s`` replicas above ``eviction_threshold_chars`` lose their oldest prompts down to
``eviction_target_chars``.

The tree is an actor shared by the routers of all proxies. Here a :class:`SharedTree` is handed to the routers of one
run; they see each other's prompts at once, where the actor takes a call.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from random import Random

from autoscaling.simulator.baselines.choices import (
    CHARS_PER_TOKEN,
    available,
    choice,
    nobody,
    prompt_chars,
    queue_length,
)
from autoscaling.simulator.baselines.load_routers import PowerOfTwo
from autoscaling.simulator.baselines.prefix_tree import PrefixTree
from policies.routing.strategy import RoutingStrategy
from policies.types import ReplicaId, ReplicaView, Request, RouteChoice


@dataclass(frozen=True, slots=True)
class RayPrefixSettings:
    """Arguments of ``initialize_state`` with their defaults."""

    imbalanced_threshold: float = math.inf
    match_rate_threshold: float = 0.1
    do_eviction: bool = False
    eviction_threshold_chars: int = 400_000
    eviction_target_chars: int = 360_000
    eviction_interval_s: float = 10.0


@dataclass(slots=True)
class SharedTree:
    """The tree actor."""

    settings: RayPrefixSettings = field(default_factory=RayPrefixSettings)
    tree: PrefixTree = field(init=False)
    evicted_ns: int | None = None

    def __post_init__(self) -> None:
        self.tree = PrefixTree(inner_times=True, keep_tails=self.settings.do_eviction)

    def evict_if_due(self, now_ns: int) -> None:
        """The actor's eviction loop."""
        if not self.settings.do_eviction:
            return
        if self.evicted_ns is None:
            self.evicted_ns = now_ns
        if now_ns - self.evicted_ns < self.settings.eviction_interval_s * 1e9:
            return
        self.evicted_ns = now_ns
        for tenant, chars in list(self.tree.tenant_chars.items()):
            if chars > self.settings.eviction_threshold_chars:
                self.tree.evict_oldest(tenant, chars - self.settings.eviction_target_chars)


class RayPrefixAffinity(RoutingStrategy):
    """One proxy's router.

    Args:
        shared: the tree of all routers of the run, and the settings.
        rng: draws the fallback pair.
    """

    def __init__(self, shared: SharedTree, rng: Random) -> None:
        self._shared = shared
        self._settings = shared.settings
        self._power_of_two = PowerOfTwo(rng)
        self._now_ns = 0

    def choose(
        self, request: Request, views: Sequence[ReplicaView], strength: float | None, now_ns: int
    ) -> RouteChoice:
        """Candidates by prefix, shortest queue first; the fallback pair where queues are too unlike."""
        self._now_ns = now_ns
        self._shared.evict_if_due(now_ns)
        ready = available(views)
        if not ready:
            return nobody(views)
        tree = self._shared.tree
        for view in views:
            tree.add_tenant(view.replica_id)
        fallback = self._power_of_two.choose(request, ready, strength, now_ns)
        if self._is_imbalanced(ready):
            return fallback
        candidates, matched = self._candidates(request, {v.replica_id for v in ready})
        if not candidates:
            return fallback
        queues = {v.replica_id: queue_length(v) for v in ready if v.replica_id in candidates}
        order = sorted((r for r in tree.tenant_chars if r in queues), key=queues.__getitem__)
        text = f"{matched} of {len(request.blocks)} blocks matched, {len(order)} candidates"
        hits = dict.fromkeys(order, min(matched * request.block_tokens, request.prompt_tokens)) if matched else {}
        return choice(order, "prefix_match" if matched else "smallest_tenant", text, hits)

    def dispatched(self, request: Request, replica_id: ReplicaId) -> None:
        """``on_request_routed``: the prompt goes into the tree."""
        self._shared.tree.insert(request, replica_id, self._now_ns)

    def forget(self, replica_id: ReplicaId) -> None:
        """``update_replicas``: the tenant goes."""
        self._shared.tree.remove_tenant(replica_id)

    def _is_imbalanced(self, ready: Sequence[ReplicaView]) -> bool:
        if math.isinf(self._settings.imbalanced_threshold):
            return False
        queues = [queue_length(v) for v in ready]
        return max(queues) - min(queues) > self._settings.imbalanced_threshold

    def _candidates(self, request: Request, ready: Collection[ReplicaId]) -> tuple[set[ReplicaId], int]:
        """Replicas to choose from and the blocks they match; 0 where the match is below the threshold."""
        tree = self._shared.tree
        matched, node = tree.match(request.blocks, ready)
        rate = matched * request.block_tokens * CHARS_PER_TOKEN / prompt_chars(request)
        if node is not None and rate >= self._settings.match_rate_threshold:
            return {r for r in node.times if r in ready}, matched
        smallest = min(tree.tenant_chars.values())
        return {r for r, chars in tree.tenant_chars.items() if chars == smallest and r in ready}, 0
