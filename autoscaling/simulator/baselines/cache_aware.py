"""The cache-aware policy of vllm-router and of SGLang's router, from which it comes.

Source: vllm-router 0.1.17 (PyPI; defaults in ``vllm_router/router_args.py``, rule in ``src/policies/cache_aware.rs``
and ``src/tree.rs`` of github.com/vllm-project/router), policy ``cache_aware``, the default of both projects:

1. Load of a worker: requests this router has open there. Where ``max - min > balance_abs_threshold`` (64) and
   ``max > balance_rel_threshold * min`` (1.5): the least loaded worker, the first of equals.
2. Else the prompt is matched against the router's own tree. Match rate, in characters, above ``cache_threshold`` (0.3):
   the worker that was sent the deepest matched node first, while it still holds it. At most: the least loaded worker
   (earlier versions: the worker with the smallest tree).
3. A matched worker that is gone loses its part of the tree, and the first worker takes the request.
4. Every ``eviction_interval_s`` (120; SGLang 60) workers above ``max_tree_chars`` (2**25; SGLang 2**26) lose their
   least recently inserted leaves.

The launcher's defaults are used; the Rust crate's own ``CacheAwareConfig`` has others, which the launcher overrides.
Session headers are not modelled: traces carry none. Not modelled either: the time of a matched node that is brought up
to date at every eighth match (the insertion that follows does it for the prompt's end).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoscaling.simulator.baselines.choices import CHARS_PER_TOKEN, available, choice, nobody, prompt_chars
from autoscaling.simulator.baselines.prefix_tree import PrefixTree
from policies.routing.strategy import RoutingStrategy
from policies.types import ReplicaId, ReplicaView, Request, RouteChoice


@dataclass(frozen=True, slots=True)
class CacheAwareSettings:
    """Command line options with vllm-router's defaults."""

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    eviction_interval_s: float = 120.0
    max_tree_chars: int = 2**25


SGLANG = CacheAwareSettings(eviction_interval_s=60.0, max_tree_chars=2**26)
"""Defaults of sglang-router 0.3.2, where they differ."""


class CacheAware(RoutingStrategy):
    """One router process."""

    def __init__(self, settings: CacheAwareSettings | None = None) -> None:
        self._settings = settings or CacheAwareSettings()
        self._tree = PrefixTree(inner_times=False, keep_tails=True)
        self._epoch = 0
        self._evicted_ns: int | None = None

    def choose(
        self,
        request: Request,
        views: Sequence[ReplicaView],
        strength: float | None,  # noqa: ARG002 - there is no loop that weighs prefixes
        now_ns: int,
    ) -> RouteChoice:
        """The one worker that takes the request."""
        self._evict_if_due(now_ns)
        ready = available(views)
        if not ready:
            return nobody(views)
        for view in views:
            self._tree.add_tenant(view.replica_id)
        loads = {v.replica_id: v.local_requests for v in ready}
        most, least = max(loads.values()), min(loads.values())
        idle = min(loads, key=loads.__getitem__)
        settings = self._settings
        if most - least > settings.balance_abs_threshold and most > settings.balance_rel_threshold * least:
            return choice([idle], "load_balance", f"loads from {least} to {most} requests")
        matched, node = self._tree.match(request.blocks)
        rate = matched * request.block_tokens * CHARS_PER_TOKEN / prompt_chars(request)
        if node is None or rate <= settings.cache_threshold:
            return choice([idle], "low_match_min_load", f"{rate:.0%} of the prompt matched, {least} requests there")
        tenant = node.creator if node.creator in node.times else next(iter(node.times))
        if tenant not in loads:
            self._tree.remove_tenant(tenant)
            return choice([ready[0].replica_id], "stale_worker", f"{tenant} is gone")
        node.creator = tenant
        hits = {tenant: min(matched * request.block_tokens, request.prompt_tokens)}
        return choice([tenant], "cache_affinity", f"{rate:.0%} of the prompt matched", hits)

    def dispatched(self, request: Request, replica_id: ReplicaId) -> None:
        """The prompt goes into the tree, whatever led to the choice."""
        self._epoch += 1
        self._tree.insert(request, replica_id, self._epoch)

    def forget(self, replica_id: ReplicaId) -> None:
        """The worker was removed."""
        self._tree.remove_tenant(replica_id)

    def _evict_if_due(self, now_ns: int) -> None:
        if self._evicted_ns is None:
            self._evicted_ns = now_ns
        if now_ns - self._evicted_ns >= self._settings.eviction_interval_s * 1e9:
            self._evicted_ns = now_ns
            self._tree.evict_leaves(self._settings.max_tree_chars)
