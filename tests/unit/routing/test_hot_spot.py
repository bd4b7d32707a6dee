"""Hot-spot collapse and its mirror, played through the real book, fleet and router against a crude serial engine.

Each replica computes prefills one after the other and then decodes freely; clients start a new request when one ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from policies.config import RoutingConfig
from policies.routing.fleet import Fleet
from policies.routing.load import LoadBook
from policies.routing.prefix_index import PrefixIndex
from policies.routing.router import Router
from policies.types import Request
from tests.unit.routing.build import chain, request

FIXED_MS, PREFILL_MS_PER_TOKEN, DECODE_MS_PER_TOKEN = 20.0, 0.5, 30.0


@dataclass
class Result:
    imbalance: list[float] = field(default_factory=list)
    """Largest over mean number of open requests, sampled at each end."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    left_open: int = 0

    @property
    def steady_imbalance(self) -> float:
        half = self.imbalance[len(self.imbalance) // 2 :]
        return sum(half) / len(half)

    @property
    def hit_share(self) -> float:
        return self.cached_tokens / self.prompt_tokens


class World:
    def __init__(self, config: RoutingConfig, replicas: int, gateways: int) -> None:
        self.books = [LoadBook() for _ in range(gateways)]
        self.fleets = [Fleet(config, b) for b in self.books]
        self.routers = [Router(config, PrefixIndex(config.index_blocks_max), Random(g)) for g in range(gateways)]
        self.ids = [f"r{i}" for i in range(replicas)]
        for fleet in self.fleets:
            fleet.update(dict.fromkeys(self.ids), 0)
        self.free_ms = dict.fromkeys(self.ids, 0.0)
        self.cached: dict[str, set[int]] = {r: set() for r in self.ids}
        self.open = dict.fromkeys(self.ids, 0)
        self.events: list[tuple[float, int, int, str, Request]] = []
        self.result = Result()

    def start(self, now_ms: float, n: int, req: Request, output_tokens: int) -> None:
        g = n % len(self.books)
        choice = self.routers[g].choose(req, self.fleets[g].views(int(now_ms * 1e6)), None, int(now_ms * 1e6))
        replica = choice.order[0]
        uncached = max(1, req.prompt_tokens - choice.predicted_hit_tokens[replica])
        self.books[g].dispatched(replica, req.request_id, uncached, req.prompt_tokens)
        self.routers[g].dispatched(req, replica)
        self.open[replica] += 1
        held = sum(1 for b in req.blocks if b in self.cached[replica]) * req.block_tokens
        self.cached[replica].update(req.blocks)
        self.result.prompt_tokens += req.prompt_tokens
        self.result.cached_tokens += held
        first_ms = max(now_ms, self.free_ms[replica]) + FIXED_MS + PREFILL_MS_PER_TOKEN * (req.prompt_tokens - held)
        self.free_ms[replica] = first_ms
        heapq.heappush(self.events, (first_ms, 0, n, replica, req))
        heapq.heappush(self.events, (first_ms + output_tokens * DECODE_MS_PER_TOKEN, 1, n, replica, req))

    def run(self, make: Callable[[int], Request], clients: int, total: int, output_tokens: int) -> Result:
        for n in range(clients):
            self.start(0.0, n, make(n), output_tokens)
        sent = clients
        while self.events:
            now_ms, over, n, replica, req = heapq.heappop(self.events)
            book = self.books[n % len(self.books)]
            if not over:
                book.first_byte(req.request_id)
                continue
            book.released(req.request_id)
            self.open[replica] -= 1
            if sent < total:
                self.start(now_ms, sent, make(sent), output_tokens)
                sent += 1
                self.result.imbalance.append(max(self.open.values()) * len(self.ids) / sum(self.open.values()))
        self.result.left_open = sum(b.inflight for b in self.books)
        return self.result


def prompt(n: int, prefix: int, blocks: int) -> Request:
    return request(chain(prefix, blocks), blocks * 64 + 50, f"tg-{n}")


@pytest.mark.parametrize("gateways", [1, 2])
def test_480_clients_on_one_4k_prefix_use_all_8_replicas(gateways: int) -> None:
    result = World(RoutingConfig(), 8, gateways).run(
        lambda n: prompt(n, 0, 64), clients=480, total=1_500, output_tokens=64
    )
    assert result.steady_imbalance < 1.5
    assert result.hit_share > 0.95
    assert result.left_open == 0


def test_prefill_dominated_unique_prompts_stay_balanced() -> None:
    result = World(RoutingConfig(), 8, 1).run(lambda n: prompt(n, n, 512), clients=64, total=300, output_tokens=1)
    assert result.steady_imbalance < 1.5


def test_one_big_tenant_and_seven_small_ones() -> None:
    def make(n: int) -> Request:
        return prompt(n, 0 if n % 2 else 1 + (n // 2) % 7, 64)

    result = World(RoutingConfig(), 8, 1).run(make, clients=480, total=1_500, output_tokens=64)
    assert result.steady_imbalance < 1.5
    assert result.hit_share > 0.9, "affinity of the small tenants is kept under the imbalance of the big one"


def test_sessions_stay_with_their_replica() -> None:
    def make(n: int) -> Request:
        return prompt(n, n % 12, 20)

    affinity = World(RoutingConfig(), 2, 1).run(make, clients=4, total=48, output_tokens=16)
    random = World(RoutingConfig(strategy="random"), 2, 1).run(make, clients=4, total=48, output_tokens=16)
    assert affinity.hit_share > 0.7 > random.hit_share
