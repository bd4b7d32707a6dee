"""The autoscaling policy: follows a fresh plan, falls back to its local rule, and can be carried to Serve's process."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.constants import SERVE_AUTOSCALING_DECISION_COUNTERS_KEY
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingConfig, AutoscalingContext

from deployments.clock import now_ns
from deployments.control_view import wire_plan
from deployments.scaling import (
    INFLIGHT_METRIC,
    REPLICA_PREFIX,
    WAKE_AFTER_S,
    FollowedPlan,
    PlanFollowingPolicy,
    RoomWatch,
    autoscaling_config,
    decide,
)
from deployments.settings import Settings
from policies.steering import Knob, Lever, Override
from policies.types import Mode
from tests.unit.control.rig import REPLICAS, Rig, Scripted, every, quiet_config

ENGINE = DeploymentID(name="Engine", app_name="app")
S_NS = 1_000_000_000


def _config(**sections: Any) -> AutoscalingConfig:
    return AutoscalingConfig(**autoscaling_config(Settings.load(sections)))


def _ctx(
    *, running: int = 1, target: int = 1, most: int = 4, inflight: list[float] | None = None, requests: float = 0
) -> AutoscalingContext:
    replicas = [ReplicaID(unique_id=f"r{i}", deployment_id=ENGINE) for i in range(running)]
    metrics = {} if inflight is None else {INFLIGHT_METRIC: dict(zip(replicas, inflight, strict=False))}
    return AutoscalingContext(
        deployment_id=ENGINE,
        deployment_name=ENGINE.name,
        app_name=ENGINE.app_name,
        current_num_replicas=running,
        target_num_replicas=target,
        running_replicas=replicas,
        total_num_requests=requests,
        total_queued_requests=0,
        aggregated_metrics=lambda: metrics,
        raw_metrics=dict,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=most,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=None,
        config=_config(scaling={"replicas_max": 4}),
    )


def _policy(*, acting: bool = True) -> PlanFollowingPolicy:
    return PlanFollowingPolicy("PREFIX::{app}::Gateway::", "::controller", "serve", inflight_target=8, acting=acting)


def _plan(seq: int = 1, target: int | None = None, **changes: Any) -> dict[str, Any]:
    return {"epoch": "e", "seq": seq, "ttl_ms": 10_000.0, "mode": "act", "replicas_target": target} | changes


# --- the rule ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("asked", "answer"), [(1, 1), (3, 3), (9, 4), (0, 1)])
def test_a_fresh_plan_is_followed_within_bounds(asked: int, answer: int) -> None:
    assert decide(_plan(target=asked), 2, (1, 4), 1_000.0, 8)[0] == answer


def test_a_plan_without_opinion_holds_whatever_the_load() -> None:
    assert decide(_plan(target=None), 2, (1, 4), 1_000.0, 8)[0] == 2


def test_a_shadow_plan_holds() -> None:
    assert decide(_plan(target=4, mode="shadow"), 2, (1, 4), 1_000.0, 8)[0] == 2


@pytest.mark.parametrize(
    ("inflight", "target", "answer"),
    [
        (0.0, 1, 1),
        (8.0, 1, 1),
        (8.1, 1, 2),
        (24.0, 1, 3),
        (1e9, 1, 4),
        (0.0, 3, 3),  # never down without a plan
        (9.0, 3, 3),
        (None, 3, 3),  # nobody reports
        (float("nan"), 3, 3),
        (float("inf"), 3, 3),
    ],
)
def test_without_a_plan_the_number_rises_with_open_requests_and_never_falls(
    inflight: float | None, target: int, answer: int
) -> None:
    assert decide(None, target, (1, 4), inflight, 8)[0] == answer


def test_a_target_outside_changed_bounds_is_brought_inside() -> None:
    assert decide(_plan(target=None), 9, (1, 4), None, 8)[0] == 4
    assert decide(None, 1, (2, 4), 0.0, 8)[0] == 2


# --- the plan's age ---------------------------------------------------------------------------------------------------


def test_a_plan_is_in_force_until_its_ttl_and_not_after() -> None:
    followed = FollowedPlan()
    assert followed.current(0) is None
    followed.receive(_plan(), 5 * S_NS)
    assert followed.current(15 * S_NS) is not None
    assert followed.current(15 * S_NS + 1) is None


def test_the_same_plan_again_does_not_grow_younger_and_an_older_one_is_ignored() -> None:
    followed = FollowedPlan()
    followed.receive(_plan(seq=5, target=3), 0)
    followed.receive(_plan(seq=5, target=3), 9 * S_NS)
    followed.receive(_plan(seq=4, target=1), 9 * S_NS)
    assert followed.current(11 * S_NS) is None
    held = followed.current(10 * S_NS)
    assert held is not None
    assert held["replicas_target"] == 3


def test_a_new_controller_s_first_plan_replaces_the_old_one_s() -> None:
    followed = FollowedPlan()
    followed.receive(_plan(seq=500, target=3), 0)
    followed.receive(_plan(seq=1, target=2, epoch="f"), 1)
    held = followed.current(1)
    assert held is not None
    assert held["replicas_target"] == 2


# --- as Serve calls it ------------------------------------------------------------------------------------------------


def test_before_any_plan_the_local_rule_counts_all_replicas() -> None:
    assert _policy()(_ctx(running=2, target=2, inflight=[10.0, 15.0]))[0] == 4
    assert _policy()(_ctx(running=2, target=2, inflight=[1.0, 0.0]))[0] == 2
    assert _policy()(_ctx(running=2, target=2))[0] == 2


def test_a_received_plan_is_followed_down_as_well() -> None:
    policy = _policy()
    policy.receive(_plan(target=1), now_ns())
    assert policy(_ctx(running=3, target=3, inflight=[100.0] * 3))[0] == 1


def test_an_old_plan_is_left_for_the_local_rule() -> None:
    policy = _policy()
    policy.receive(_plan(target=1), now_ns() - 11 * S_NS)
    assert policy(_ctx(running=2, target=2, inflight=[12.0, 12.0]))[0] == 3


def test_in_shadow_mode_the_number_is_left_alone_plan_or_not() -> None:
    policy = _policy(acting=False)
    assert policy(_ctx(running=2, target=2, inflight=[100.0, 100.0]))[0] == 2
    policy.receive(_plan(target=4, mode="shadow"), now_ns())
    assert policy(_ctx(running=2, target=2))[0] == 2


@pytest.mark.parametrize(
    ("configured", "by_hand", "followed"),
    [
        (Mode.SHADOW, [], None),
        (Mode.SHADOW, [Override("o", Knob.REPLICAS_TARGET, value=4, remaining_ms=60_000)], 4),
        (Mode.SHADOW, [Override("o", Knob.REPLICAS_TARGET, mode="act", remaining_ms=60_000)], 3),
        (Mode.SHADOW, [Override("o", Knob.RUNNING_SEQS_MAX, value=4, remaining_ms=60_000)], None),
        (Mode.ACT, [], 3),
        (Mode.ACT, [Override("o", None, mode="shadow", remaining_ms=60_000)], None),
        (
            Mode.ACT,
            [
                Override("o", None, mode="shadow", remaining_ms=60_000),
                Override("p", Knob.REPLICAS_TARGET, value=4, remaining_ms=60_000),
            ],
            4,
        ),
    ],
    ids=["shadow", "number", "act", "another knob", "acting", "shadow by hand", "number in shadow by hand"],
)
def test_what_people_set_counts_more_than_the_configured_mode(
    configured: Mode, by_hand: list[Override], followed: int | None
) -> None:
    """From the override to Serve's number, through the controller's tick and the plan as it travels."""
    grows = Scripted(Lever.REPLICAS, {REPLICAS: 2}, every(1_000, 3, begin=5))
    rig = Rig(quiet_config(mode=configured), [grows], replicas=2)
    for override in by_hand:
        rig.state.overrides.put(override, rig.now_ns)
    rig.run(6)
    policy = _policy(acting=configured is Mode.ACT)
    policy.receive(wire_plan(rig.results[-1].plan), now_ns())
    assert policy(_ctx(running=2, target=2))[0] == (followed or 2)


def test_serve_passes_the_answer_on_undamped_in_both_directions() -> None:
    policy = _policy()
    as_serve_wraps_it = _apply_autoscaling_config(policy)
    policy.receive(_plan(seq=1, target=4), now_ns())
    up, state = as_serve_wraps_it(_ctx(running=1, target=1))
    assert (up, state[SERVE_AUTOSCALING_DECISION_COUNTERS_KEY]) == (4, 0)
    policy.receive(_plan(seq=2, target=1), now_ns())
    assert as_serve_wraps_it(_ctx(running=4, target=4))[0] == 1


def test_serve_goes_to_zero_by_way_of_one_and_asks_the_policy_there_as_well() -> None:
    policy = _policy()
    as_serve_wraps_it = _apply_autoscaling_config(policy)

    def asked(running: int, target: int) -> int:
        ctx = _ctx(running=running, target=target)
        ctx.capacity_adjusted_min_replicas = 0
        return int(as_serve_wraps_it(ctx)[0])

    policy.receive(_plan(seq=1, target=0), now_ns())
    assert (asked(2, 2), asked(1, 1), asked(0, 0)) == (1, 0, 0)
    policy.receive(_plan(seq=2, target=1), now_ns())
    assert asked(0, 0) == 1


def test_without_ray_the_exchange_ends_quietly() -> None:
    policy = _policy()
    policy(_ctx())
    exchange = policy._exchange
    assert exchange is not None
    exchange.join(10)
    assert not exchange.is_alive()
    assert policy._controller is None


def test_two_questions_within_a_second_are_one_exchange() -> None:
    policy = _policy()
    policy(_ctx())
    first = policy._exchange
    policy(_ctx())
    assert policy._exchange is first


def test_replicas_without_room_are_counted_by_how_long_they_wait() -> None:
    watch, pg, actor = RoomWatch(), f"{REPLICA_PREFIX}app#Engine#a", f"{REPLICA_PREFIX}app#Engine#b"
    placed = {f"{REPLICA_PREFIX}app#Engine#c": "CREATED"}
    assert watch.count(placed | {pg: "PENDING"}, [pg, actor], 0) == 0
    assert watch.count(placed | {pg: "PENDING"}, [pg, actor], 5 * S_NS) == 1
    assert watch.count(placed | {pg: "PENDING"}, [pg, actor], 30 * S_NS) == 2
    assert watch.count(placed | {pg: "CREATED"}, [pg, actor], 31 * S_NS) == 1  # placed, and starts now
    assert watch.count(placed, [], 32 * S_NS) == 0
    assert watch.count(placed | {pg: "RESCHEDULING"}, [actor], 33 * S_NS) == 0


def test_serve_names_replicas_as_the_watch_expects() -> None:
    assert ReplicaID(unique_id="r1", deployment_id=ENGINE).to_full_id_str() == f"{REPLICA_PREFIX}app#Engine#r1"


def test_what_ray_does_not_tell_is_no_shortage_of_room() -> None:
    missing = {"replicas_running": 0, "replicas_target": 1}
    assert _policy()._unschedulable(missing, "app", "Engine") == 0


def test_without_a_plan_for_long_a_model_that_sleeps_is_woken_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, ctx = _policy(), _ctx(running=0, target=0)
    ctx.capacity_adjusted_min_replicas = 0
    start_ns = now_ns()
    for after_s, answer in ((0, 0), (WAKE_AFTER_S - 1, 0), (WAKE_AFTER_S + 1, 1)):
        monkeypatch.setattr("time.monotonic_ns", lambda at=start_ns + int(after_s * S_NS): at)
        assert policy(ctx)[0] == answer
    policy.receive(_plan(target=0), start_ns + int((WAKE_AFTER_S + 1) * S_NS))
    assert policy(ctx)[0] == 0


# --- configuration ----------------------------------------------------------------------------------------------------


def test_serve_accepts_the_configuration_and_neither_delays_nor_scales() -> None:
    config = _config(scaling={"replicas_min": 2, "replicas_max": 5, "inflight_target": 3})
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (2, 2, 5)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (0, 0)
    assert (config.get_upscaling_factor(), config.get_downscaling_factor()) == (1, 1)
    assert config.policy.policy_kwargs["inflight_target"] == 3


def test_a_model_that_may_sleep_starts_once_with_its_deployment() -> None:
    config = _config(scaling={"replicas_min": 0})
    assert (config.min_replicas, config.initial_replicas) == (0, 1)


@pytest.mark.parametrize(
    ("mode", "enabled", "acting"), [("act", True, True), ("shadow", True, False), ("act", False, False)]
)
def test_in_shadow_mode_and_switched_off_the_policy_does_not_act(mode: str, enabled: bool, acting: bool) -> None:
    config = _config(control={"mode": mode}, scaling={"enabled": enabled})
    assert config.policy.policy_kwargs["acting"] is acting


@pytest.mark.slow
def test_the_policy_runs_in_a_process_that_does_not_have_the_project(tmp_path: Path) -> None:
    carried = _config().policy.get_serialized_policy_def()
    kwargs = _config().policy.policy_kwargs
    (tmp_path / "policy").write_bytes(pickle.dumps((carried, kwargs)))
    probe = (
        "import pickle, sys\n"
        "from ray import cloudpickle\n"
        "carried, kwargs = pickle.load(open('policy', 'rb'))\n"
        "policy = cloudpickle.loads(carried)(**kwargs)\n"
        "policy.receive({'epoch': 'e', 'seq': 1, 'ttl_ms': 1e4, 'mode': 'act', 'replicas_target': 2}, 0)\n"
        "assert not {'deployments', 'policies', 'autoscaling'} & {m.split('.')[0] for m in sys.modules}\n"
        "print(policy._followed.current(0)['replicas_target'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", probe], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


@pytest.mark.slow
def test_the_actor_s_shell_loads_in_a_process_that_does_not_have_the_project(tmp_path: Path) -> None:
    from deployments.controller_actor import controller_actor_config

    (tmp_path / "actor").write_bytes(controller_actor_config(Settings.load({}))._serialized_actor_class)
    probe = "from ray import cloudpickle; print(type(cloudpickle.loads(open('actor', 'rb').read())).__name__)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", probe], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
