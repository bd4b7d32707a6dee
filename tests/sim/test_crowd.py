"""A flash crowd of four times, and engines that take a minute to start: who is refused is told a time that is true."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from random import Random

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.spec import ClientSpec, Pool, SimRequest, StepLaw
from autoscaling.simulator.world import run
from policies.config import ObjectivesConfig, PolicyConfig, ScalingConfig
from policies.events import Finish
from tests.sim.worlds import PROFILE, SECOND, Watcher, listed, settled

ENGINE = replace(
    PROFILE, gpus=1, law=StepLaw(30.0, 1.0, 0.0, 0.05), cold_start_ms=60_000.0, running_seqs_max=4, kv_tokens=32_000
)
USUAL_PS, TTFT_MS = 2.6, 2_000.0


def crowd() -> list[SimRequest]:
    """Twenty seconds of the usual load, then four times as much for two and a half minutes."""
    rng, at_s = Random("crowd"), 0.0
    found: list[SimRequest] = []
    while (at_s := at_s + rng.expovariate(USUAL_PS * (4 if at_s > 20 else 1))) < 170:
        found.append(SimRequest(len(found), round(at_s * SECOND), rng.randint(40, 200), 32, output_tokens_max=32))
    return found


def test_who_comes_again_when_told_is_served() -> None:
    config = PolicyConfig(objectives=ObjectivesConfig(ttft_ms=TTFT_MS), scaling=ScalingConfig(replicas_max=5))
    watcher = Watcher()
    pools = (Pool(ENGINE, 1, scaler=ReplicaScaler),)
    scenario = listed(crowd(), pools=pools, config=config, gateways=1, clients=ClientSpec(retries_max=1))
    result = run(scenario, observer=watcher)
    settled(result, watcher)
    ends: dict[str, list[str]] = defaultdict(list)
    for _, _, request_id, _, effects in watcher.flows:
        ends[request_id.split("-")[0]] += [e.outcome.value for e in effects if isinstance(e, Finish)]
    again = [outcomes[1] for outcomes in ends.values() if len(outcomes) == 2]
    assert len(again) > 300
    assert again.count("succeeded") >= 0.95 * len(again)
    assert result.pools[0].replicas_max >= 4
