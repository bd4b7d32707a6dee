"""Small builders shared by the routing tests."""

from __future__ import annotations

from random import Random

from policies.config import RoutingConfig
from policies.routing.prefix_index import PrefixIndex
from policies.routing.router import Router
from policies.types import ReplicaView, Request, StepCoefficients

STEP = StepCoefficients(10.0, 0.5, 0.5, 0.5)


def chain(prefix: int, blocks: int) -> tuple[int, ...]:
    """Block hashes of one prompt: equal for equal ``prefix``, a prefix of each other for different lengths."""
    rng = Random(prefix)
    return tuple(rng.getrandbits(64) for _ in range(blocks))


def request(
    blocks: tuple[int, ...] = (), prompt_tokens: int | None = None, request_id: str = "tg-0", block_tokens: int = 64
) -> Request:
    return Request(
        request_id=request_id,
        model="m",
        endpoint="/v1/chat/completions",
        tenant="t",
        prompt_tokens=len(blocks) * block_tokens + 20 if prompt_tokens is None else prompt_tokens,
        output_tokens_max=64,
        blocks=blocks,
        block_tokens=block_tokens,
        stream=True,
        arrival_ns=0,
    )


def view(
    replica_id: str,
    *,
    requests: int = 0,
    prefill_tokens: int = 0,
    decode_tokens: int = 0,
    why: str = "",
    **sample: float | StepCoefficients | None,
) -> ReplicaView:
    step: dict[str, object] = {"step_model": STEP, **sample}
    return ReplicaView(
        replica_id,
        requests,
        prefill_tokens,
        decode_tokens,
        available=not why,
        unavailable_reason=why,
        **step,  # type: ignore[arg-type]
    )


def router(config: RoutingConfig | None = None, seed: int = 0) -> Router:
    config = config or RoutingConfig()
    return Router(config, PrefixIndex(config.index_blocks_max), Random(seed))
