"""The approximate prefix trees of Ray's and vLLM's routers, over prompt blocks instead of characters.

Both projects keep a radix tree of prompt texts whose nodes know the replicas ("tenants") that were sent them. Here the
prompt comes as chain hashes of blocks, each of which stands for everything before it too: a dictionary from hash to
node is the same tree with edges of one block. Lengths are in characters (:data:`CHARS_PER_TOKEN` a token), as there.
The rest of a prompt behind its last full block is a leaf of its own that nothing else matches.

Two ways to forget, one per project: :meth:`PrefixTree.evict_oldest` (Ray: per tenant, oldest time first, all of one
time together) and :meth:`PrefixTree.evict_leaves` (vllm-router: leaves first, least recently inserted first).

What this must not do: choose a replica.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from autoscaling.simulator.baselines.choices import CHARS_PER_TOKEN, prompt_chars
from policies.types import ReplicaId, Request


@dataclass(slots=True)
class Node:
    """One block of a prompt, below the blocks before it."""

    key: int
    parent: Node | None
    chars: int
    creator: ReplicaId
    """The tenant that was sent it first."""
    times: dict[ReplicaId, int] = field(default_factory=dict)
    """Tenants and when each was last sent it."""
    children: dict[int, Node] = field(default_factory=dict)


class PrefixTree:
    """Which tenant was sent which prompts.

    Args:
        inner_times: whether a prompt brings the times of all its nodes up to date (Ray), or of its last one
            (vllm-router).
        keep_tails: whether the rest behind the last full block is a node; where nothing is ever evicted, counting its
            characters is enough.
    """

    def __init__(self, *, inner_times: bool, keep_tails: bool) -> None:
        self._inner_times = inner_times
        self._keep_tails = keep_tails
        self._nodes: dict[int, Node] = {}
        self._tails = 0
        self.tenant_chars: dict[ReplicaId, int] = {}
        """Characters each tenant is believed to hold, in the order in which tenants came."""

    def add_tenant(self, tenant: ReplicaId) -> None:
        """Know ``tenant``; nothing happens when it is known already."""
        self.tenant_chars.setdefault(tenant, 0)

    def insert(self, request: Request, tenant: ReplicaId, time: int) -> None:
        """``request`` was sent to ``tenant``. ``time`` must grow from call to call for an exact order of eviction."""
        self.add_tenant(tenant)
        chars = request.block_tokens * CHARS_PER_TOKEN
        node: Node | None = None
        for block in request.blocks:
            node = self._visit(block, node, chars, tenant, time if self._inner_times else 0)
        tail_chars = prompt_chars(request) - chars * len(request.blocks)
        if tail_chars > 0 and self._keep_tails:
            self._tails += 1
            node = self._visit(-self._tails, node, tail_chars, tenant, time)
        elif tail_chars > 0:
            self.tenant_chars[tenant] += tail_chars
        if node is not None:
            node.times[tenant] = time

    def match(self, blocks: Sequence[int], tenants: Collection[ReplicaId] | None = None) -> tuple[int, Node | None]:
        """Leading blocks in the tree and the last one's node; with ``tenants``, only nodes that one of them holds."""
        found: Node | None = None
        for n, block in enumerate(blocks):
            node = self._nodes.get(block)
            if node is None or (tenants is not None and not any(t in tenants for t in node.times)):
                return n, found
            found = node
        return len(blocks), found

    def remove_tenant(self, tenant: ReplicaId) -> None:
        """Drop all a tenant holds; unknown ones change nothing. O(nodes)."""
        if self.tenant_chars.pop(tenant, None) is None:
            return
        for node in [n for n in reversed(self._nodes.values()) if tenant in n.times]:  # children before their parents
            del node.times[tenant]
            self._drop_if_empty(node)

    def evict_oldest(self, tenant: ReplicaId, chars_min: int) -> None:
        """Take at least ``chars_min`` characters from ``tenant``, oldest nodes first, those of one time together."""
        children_first = [n for n in reversed(self._nodes.values()) if tenant in n.times]
        held = sorted(children_first, key=lambda n: n.times[tenant])
        removed, last_time = 0, None
        for node in held:
            if removed >= chars_min and node.times[tenant] != last_time:
                return
            last_time = node.times[tenant]
            removed += node.chars
            self._take(node, tenant)

    def evict_leaves(self, chars_max: int) -> None:
        """Bring every tenant down to ``chars_max`` characters, taking its least recent leaves."""
        for tenant in [t for t, chars in self.tenant_chars.items() if chars > chars_max]:
            heap = [
                (node.times[tenant], order, node)
                for order, node in enumerate(self._nodes.values())
                if tenant in node.times and _is_leaf(node, tenant)
            ]
            heapq.heapify(heap)
            order = len(self._nodes)
            while heap and self.tenant_chars[tenant] > chars_max:
                _, _, node = heapq.heappop(heap)
                parent = node.parent
                self._take(node, tenant)
                if parent is not None and tenant in parent.times and _is_leaf(parent, tenant):
                    order += 1
                    heapq.heappush(heap, (parent.times[tenant], order, parent))

    def __len__(self) -> int:
        return len(self._nodes)

    def _visit(self, key: int, parent: Node | None, chars: int, tenant: ReplicaId, time: int) -> Node:
        node = self._nodes.get(key)
        if node is None:
            node = self._nodes[key] = Node(key, parent, chars, tenant)
            if parent is not None:
                parent.children[key] = node
        if tenant not in node.times:
            self.tenant_chars[tenant] += node.chars
            node.times[tenant] = time
        elif time:
            node.times[tenant] = time
        return node

    def _take(self, node: Node, tenant: ReplicaId) -> None:
        del node.times[tenant]
        self.tenant_chars[tenant] -= node.chars
        self._drop_if_empty(node)

    def _drop_if_empty(self, node: Node) -> None:
        if node.times or node.children:
            return
        del self._nodes[node.key]
        if node.parent is not None:
            del node.parent.children[node.key]


def _is_leaf(node: Node, tenant: ReplicaId) -> bool:
    return not any(tenant in child.times for child in node.children.values())
