"""A split fleet whose load turns from long prompts to long answers: roles follow, and that pays."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import pytest

from autoscaling.roles import RoleBoard
from autoscaling.simulator.report import summarise
from autoscaling.simulator.spec import Pool, ScalerFactory, Scenario, SimRequest, StepLaw
from autoscaling.simulator.world import run
from policies.config import AdmissionConfig, ObjectivesConfig, PolicyConfig, ScalingConfig
from policies.config_guard import GuardConfig
from tests.sim.worlds import PROFILE, SECOND, Watcher, settled

HALF_S = 90
OBJECTIVES = ObjectivesConfig(ttft_ms=4_000, itl_ms=125)
ENGINE = replace(
    PROFILE, law=StepLaw(40.0, 0.25, 0.1, 0.05), cold_start_ms=5_000.0, running_seqs_max=48, kv_tokens=60_000
)


class Turning:
    """Long prompts with short answers, then short prompts with long answers."""

    name = "turning"

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def arrivals(self) -> Iterator[SimRequest]:
        at_s, i, rng = 0.0, 0, self._rng
        while at_s < 2 * HALF_S:
            long_prompts = at_s < HALF_S
            at_s += rng.expovariate(11.0 if long_prompts else 13.0)
            prompt, output = (4_500, 20) if long_prompts else (200, 260)
            prompt, output = rng.randint(prompt // 2, prompt * 3 // 2), rng.randint(output // 2, output * 3 // 2)
            yield SimRequest(i, round(at_s * SECOND), prompt, output, output_tokens_max=2 * output)
            i += 1

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:
        return ()


def scenario(
    prefill: int, decode: int, scalers: tuple[ScalerFactory | None, ScalerFactory | None] = (None, None)
) -> Scenario:
    config = PolicyConfig(
        objectives=OBJECTIVES,
        admission=AdmissionConfig(engine_wait_share=None),
        scaling=ScalingConfig(replicas_min=1, replicas_max=prefill + decode),
        # The guard of one pool sees everybody's promises and not what the other pool's controller changed.
        guard=GuardConfig(rollback=False),
    )
    pools = (Pool(ENGINE, prefill, "prefill", scaler=scalers[0]), Pool(ENGINE, decode, "decode", scaler=scalers[1]))
    return Scenario("roles", Turning, pools, 1, config)


def test_roles_follow_the_load_and_beat_every_fixed_ratio() -> None:
    board = RoleBoard(3, 3)
    watcher = Watcher()
    result = run(scenario(3, 3, (board.prefill_scaler, board.decode_scaler)), observer=watcher)
    settled(result, watcher)
    assert result.counters["succeeded"] == len(result.records)
    targets = [s.target for s in result.pools[0].timeline]
    most, last = max(targets), targets[-1]
    assert most > 3 > last
    turns = [b - a for a, b in itertools.pairwise(targets) if a != b]
    assert sum((x > 0) != (y > 0) for x, y in itertools.pairwise(turns)) == 1
    assert all(sum(s.target for s in second) <= 7 for second in zip(*(p.timeline for p in result.pools), strict=True))
    follows = summarise(result, OBJECTIVES)
    for prefill in (3, 4, 5):
        fixed = summarise(run(scenario(prefill, 6 - prefill)), OBJECTIVES)
        assert follows.successes > fixed.successes, f"{prefill} to prefill"


def test_a_board_needs_one_of_each_role() -> None:
    with pytest.raises(ValueError, match="at least one replica of each role"):
        RoleBoard(0, 3)
