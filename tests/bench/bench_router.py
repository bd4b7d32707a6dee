"""Cost of one routing decision: ``python -m tests.bench.bench_router``.

Prints p50 and p99 in us of CPU by replicas and blocks. A sixteenth of the replicas hold the whole prefix, half of them
half of it, the rest nothing; all have fresh samples; before each choice one request was sent, one got its first byte
and one ended. ``choose`` is what a gateway does for each request, ``all views`` the same by looking at every replica;
``update`` takes a new sample of every replica. The last line is what learning from one engine step costs.
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable

from policies.build import Policies, build_policies
from policies.config import PolicyConfig, RoutingConfig
from policies.step_model import StepModel
from policies.types import Request

REPLICAS = (1, 8, 64, 1_000)
BLOCKS = (0, 24, 100, 1_000)
ROUNDS = 1_000
OPEN = 8
"""Requests open at each replica."""


def _request(blocks: int, n: int, prefix: int) -> Request:
    rng = random.Random(n)
    shared = random.Random("prefix")
    kept = [shared.getrandbits(64) for _ in range(blocks)][:prefix]
    return Request(
        request_id=f"tg-{n:032x}",
        model="m",
        endpoint="/v1/chat/completions",
        tenant="t",
        prompt_tokens=blocks * 64 + 20,
        output_tokens_max=64,
        blocks=(*kept, *(rng.getrandbits(64) for _ in range(blocks - prefix))),
        block_tokens=64,
        stream=True,
        arrival_ns=0,
    )


def _stats(i: int, seq: int) -> dict[str, object]:
    rng = random.Random(i * 1_000 + seq)
    return {
        "seq": seq, "running": OPEN + rng.randrange(8), "waiting": 0, "prefill_backlog_tokens": rng.randrange(3_000),
        "kv_tokens_used": 8_000 + rng.randrange(4_000), "kv_tokens_max": 100_000, "running_seqs_max": 256,
        "step_tokens_max": 2_048, "step_a_ms": 6.0 + rng.random(), "step_b_ms": 0.1, "step_c_ms": 0.03,
        "step_d_ms": 0.015, "step_samples": 500 + seq, "state": "ready",
    }  # fmt: skip


def _measure(call: Callable[[int], object], rounds: int = ROUNDS) -> tuple[float, float]:
    took_us = []
    for n in range(rounds):
        start = time.thread_time_ns()
        call(n)
        took_us.append((time.thread_time_ns() - start) / 1e3)
    return statistics.median(took_us), statistics.quantiles(took_us, n=100)[98]


class Case:
    """One gateway with some load."""

    def __init__(self, replicas: int, blocks: int) -> None:
        self.policies: Policies = build_policies(PolicyConfig(), seed=0)
        self.ids = [f"replica-{i:04d}" for i in range(replicas)]
        self.update(0)
        whole = _request(blocks, 0, blocks)
        for i, r in enumerate(self.ids):
            held = blocks if i % 16 == 0 else blocks // 2 if i % 2 else 0
            self.policies.index.add(whole.blocks[:held], r)
        self.requests = [_request(blocks, n + 1, blocks * (n % 5) // 4) for n in range(ROUNDS)]
        self.now_ns = 0
        self.took_us: list[float] = []

    def update(self, n: int) -> None:
        """New samples of all replicas."""
        self.policies.update_members({r: _stats(i, n + 1) for i, r in enumerate(self.ids)}, n * 1_000_000_000)

    def request(self, n: int) -> None:
        """One request: chosen for, sent, answered; one before it ends."""
        self.now_ns += 1_000_000
        request, book = self.requests[n], self.policies.flow_context.book
        start = time.thread_time_ns()
        choice = self.policies.choose(request, (), self.now_ns)
        self.took_us.append((time.thread_time_ns() - start) / 1e3)
        replica_id = choice.order[0]
        book.dispatched(replica_id, request.request_id, 500, request.prompt_tokens)
        self.policies.router.dispatched(request, replica_id)
        if n >= OPEN:
            book.first_byte(self.requests[n - OPEN // 2].request_id)
            book.released(self.requests[n - OPEN].request_id)


def _row(replicas: int, blocks: int) -> str:
    case = Case(replicas, blocks)
    _, _ = _measure(case.request)
    chosen = statistics.median(case.took_us), statistics.quantiles(case.took_us, n=100)[98]
    policies, request = case.policies, case.requests[1]
    everybody = _measure(
        lambda n: policies.router.choose(request, policies.fleet.views(case.now_ns + n * 10**9), None, 0), 40
    )
    samples = [{r: _stats(i, n + 2) for i, r in enumerate(case.ids)} for n in range(20)]
    took = _measure(lambda n: policies.update_members(samples[n], case.now_ns + n * 10**9), 20)
    cells = "   ".join(f"{p50:9.1f} /{p99:9.1f}" for p50, p99 in (chosen, everybody, took))
    return f"{replicas:5d} replicas {blocks:5d} blocks {cells}"


def main() -> int:
    """Print the table."""
    print("us, p50 / p99                     choose              all views                 update")
    for replicas in REPLICAS:
        for blocks in BLOCKS:
            print(_row(replicas, blocks))
    model, rng = StepModel(RoutingConfig().step_prior), random.Random(0)
    steps = [(rng.randint(1, 16), rng.randint(100, 9_000), rng.choice((0, 0, 0, 512))) for _ in range(ROUNDS)]
    p50, p99 = _measure(lambda n: model.observe(*steps[n], 20 + steps[n][0] + 0.5 * steps[n][2] + rng.random()))
    print(f"StepModel.observe            {p50:9.1f} /{p99:9.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
