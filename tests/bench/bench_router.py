"""Cost of one routing decision: ``python -m tests.bench.bench_router``.

Prints p50 and p99 in us of CPU by replicas and blocks. Half of the replicas hold the whole prefix, a quarter half of
it, the rest nothing; all have fresh samples. ``choose`` is the decision, ``views`` the joining of samples and load
before it, ``dispatched`` the index update after it. The last line is what learning from one engine step costs.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable

from policies.config import RoutingConfig
from policies.routing.fleet import Fleet
from policies.routing.load import LoadBook
from policies.routing.prefix_index import PrefixIndex
from policies.routing.router import Router
from policies.step_model import StepModel
from policies.types import Request

REPLICAS = (1, 2, 8, 64)
BLOCKS = (0, 10, 100, 1_000, 2_048)
ROUNDS = 400


def _request(blocks: int, n: int) -> Request:
    return Request(
        request_id=f"tg-{n:032x}",
        model="m",
        endpoint="/v1/chat/completions",
        tenant="t",
        prompt_tokens=blocks * 64 + 20,
        output_tokens_max=64,
        blocks=tuple(random.Random(n).getrandbits(64) for _ in range(blocks)),
        block_tokens=64,
        stream=True,
        arrival_ns=0,
    )


def _stats(i: int) -> dict[str, object]:
    return {
        "seq": 1, "running": i % 7, "waiting": 0, "prefill_backlog_tokens": 100 * i, "kv_tokens_used": 500 * i,
        "kv_tokens_max": 100_000, "running_seqs_max": 16, "step_a_ms": 30.0, "step_b_ms": 1.8, "step_c_ms": 0.5,
        "step_d_ms": 1.9, "step_samples": 500, "state": "ready",
    }  # fmt: skip


def _measure(call: Callable[[int], object]) -> tuple[float, float]:
    took_us = []
    for n in range(ROUNDS):
        start = time.thread_time_ns()
        call(n)
        took_us.append((time.thread_time_ns() - start) / 1e3)
    return statistics.median(took_us), statistics.quantiles(took_us, n=100)[98]


def _case(replicas: int, blocks: int) -> list[tuple[float, float]]:
    config = RoutingConfig()
    fleet = Fleet(config, LoadBook())
    router = Router(config, PrefixIndex(config.index_blocks_max), random.Random(0))
    ids = [f"replica-{i:04d}" for i in range(replicas)]
    fleet.update({r: _stats(i) for i, r in enumerate(ids)}, 0)
    request = _request(blocks, 0)
    for i, r in enumerate(ids):
        share = (1.0, 1.0, 0.5, 0.0)[i % 4]
        router._index.add(request.blocks[: int(blocks * share)], r)
    fresh = [_request(blocks, n + 1) for n in range(ROUNDS)]
    views = fleet.views(1_000_000)
    return [
        _measure(lambda _: router.choose(request, views, None, 0)),
        _measure(lambda _: fleet.views(1_000_000)),
        _measure(lambda n: router.dispatched(fresh[n], ids[0])),
    ]


def main() -> int:
    """Print both tables."""
    print("us, p50 / p99          choose            views          dispatched (new prefix)")
    for replicas in REPLICAS:
        for blocks in BLOCKS:
            cells = "   ".join(f"{p50:7.1f} /{p99:7.1f}" for p50, p99 in _case(replicas, blocks))
            print(f"{replicas:3d} replicas {blocks:5d} blocks {cells}")
    model, rng = StepModel(RoutingConfig().step_prior), random.Random(0)
    steps = [(rng.randint(1, 16), rng.randint(100, 9_000), rng.choice((0, 0, 0, 512))) for _ in range(ROUNDS)]
    p50, p99 = _measure(lambda n: model.observe(*steps[n], 20 + steps[n][0] + 0.5 * steps[n][2] + rng.random()))
    print(f"StepModel.observe       {p50:7.1f} /{p99:7.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
