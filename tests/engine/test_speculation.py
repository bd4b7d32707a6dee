"""Real vLLM with n-gram drafts, steered by the product's loop: depth set by hand and moving, the same text always."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from policies.types import ReplicaReport
from tests.engine.conftest import MODEL_NAME
from tests.engine.steered import Steered, Stream, steered

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

HARD = 8
PROMPT = ("The tide rises, the tide falls, the gate opens, the gate closes. " * 8).rstrip()


@pytest.fixture(scope="module")
def speculating(model_folder: str) -> Iterator[Steered]:
    drafts = {"method": "ngram", "num_speculative_tokens": HARD, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    arguments = {"dtype": "float32", "max_model_len": 2_048, "max_num_seqs": 16, "speculative_config": drafts}
    model = {"name": MODEL_NAME, "source": model_folder, "report_interval_ms": 300, "engine_args": arguments}
    with steered({"model": model, "scaling": {"replicas_max": 1}, "batching": {"enabled": False}}) as engine:
        yield engine


async def decode(engine: Steered, tokens: int = 60) -> tuple[Stream, list[ReplicaReport]]:
    """One stream, and the reports of its time."""
    before = await engine.call("reports", 0)
    async with engine.client() as client:
        stream = await engine.stream(client, PROMPT, tokens)
    await asyncio.sleep(1.0)
    return stream, await engine.call("reports", before[-1].seq if before else 0)


async def hold(engine: Steered, depth: int | None) -> None:
    """Set the depth by hand and wait until it is in force."""
    await engine.call("pin", depth)
    async with asyncio.timeout(30):
        while depth is not None and await engine.call("depth") != depth:  # noqa: ASYNC110 - another process does it
            await asyncio.sleep(0.05)
    await asyncio.sleep(0.5)


async def test_the_text_is_the_same_at_every_depth_and_a_depth_set_by_hand_is_exactly_that(
    speculating: Steered,
) -> None:
    texts = []
    for depth in (0, 2, HARD):
        await hold(speculating, depth)
        stream, reports = await decode(speculating)
        texts.append("".join(stream.text))
        assert stream.tokens == 60
        assert {use.depth for r in reports for use in r.depth_use} == {depth}
        drafted = sum(r.draft_tokens for r in reports)
        assert (drafted > 0) == (depth > 0)
        assert sum(r.accepted_tokens for r in reports) <= drafted
    assert len(set(texts)) == 1


async def test_repetitive_text_takes_fewer_steps_the_deeper_it_is_drafted(speculating: Steered) -> None:
    steps = []
    for depth in (0, HARD):
        await hold(speculating, depth)
        _, reports = await decode(speculating)
        steps.append(sum(use.steps for r in reports for use in r.depth_use))
    assert steps[0] >= 2 * steps[1]


async def test_left_to_itself_the_engine_explores_and_the_depth_moves_by_what_it_finds(speculating: Steered) -> None:
    await hold(speculating, 0)
    reports: list[ReplicaReport] = (await decode(speculating, 100))[1]
    await hold(speculating, None)
    async with asyncio.timeout(300):
        reports += (await decode(speculating, 400))[1]
        while await speculating.call("depth") == 0:
            reports += (await decode(speculating, 400))[1]
    assert {use.depth for r in reports for use in r.depth_use} > {0}
    assert any("MoreGoodput" in line or "tokens/s" in line for line in await speculating.call("decisions"))
    assert max(r.speculative_depth_hard or 0 for r in reports) == HARD
