"""Serve autoscaling policy that follows the controller's plan, and its local rule for when there is none.

    fresh plan, acting     its replicas_target; no target in it: hold
    fresh plan, shadow     hold
    no fresh plan          max(target, ceil(requests open at the replicas / inflight_target)): may rise, never falls;
                           at least 1 after WAKE_AFTER_S, so that a dead controller keeps no model asleep;
                           hold where the configuration says shadow or switched scaling off

A plan's own mode counts, not the configuration's: people may set a number, or the mode, by hand.
A plan is fresh until ``ttl_ms`` after it was first received, on this process' clock; the same plan received again does
not grow younger. Serve's own delays are 0 and its factors 1 (:func:`autoscaling_config`): damping happens once, in
``autoscaling/``. Serve bounds the answer by the deployment's minimum and maximum.

The class runs inside Serve's controller process, which does not have this project on its path: Serve carries it there
by value. So this module imports nothing of the project at run time and plain dicts travel both ways. It must not block
that process: one exchange a second with the controller actor runs in a thread of its own, never two at once.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

    from deployments.settings import Settings

logger = logging.getLogger("ray.serve")

POLICY_PATH = "deployments.scaling:PlanFollowingPolicy"
"""How Serve's configuration names :class:`PlanFollowingPolicy`."""

EXCHANGE_PERIOD_S = 1.0
"""Time between two exchanges with the controller actor."""

EXCHANGE_TIMEOUT_S = 2.0
"""Longest wait for its answer."""

INFLIGHT_METRIC = "http_inflight"
"""Key of the engine's ``record_autoscaling_stats``: requests open at one replica's port."""

METRICS_INTERVAL_S = 1.0
"""How often Serve's controller gets that metric from each replica."""

LOOK_BACK_S = 5.0
"""Window Serve averages it over."""

WAKE_AFTER_S = 20.0
"""Without a fresh plan for this long a model that sleeps is woken: nobody else would. A controller that dies is
replaced sooner, and no model is started for that."""

REPLICA_PREFIX = "SERVE_REPLICA::"
"""Begin of the names that Serve gives replica actors and their placement groups; then comes ``APP#DEPLOYMENT#ID``."""

UNPLACED_S = 5.0
"""A placement group that Ray has not placed for this long finds no room."""

UNSTARTED_S = 30.0
"""An actor without a placement group that Ray has not started for this long finds none either. Ray does not tell
waiting for room from a slow start; the limit is that of Serve's own warning."""


def decide(
    plan: Mapping[str, Any] | None, target: int, bounds: tuple[int, int], inflight: float | None, inflight_target: int
) -> tuple[int, str]:
    """How many replicas, and why.

    Args:
        plan: the plan in force (``mode``, ``seq``, ``replicas_target``); ``None`` when there is no fresh one.
        target: replicas Serve wants now.
        bounds: fewest and most replicas.
        inflight: open requests of all replicas; ``None`` when no replica has reported.
        inflight_target: open requests one replica is meant for, at least 1.
    """
    low, high = bounds
    held = max(low, min(high, target))
    if plan is not None:
        if plan["mode"] != "act":
            return held, "held: the controller is in shadow mode"
        if plan["replicas_target"] is None:
            return held, "held: the plan leaves the number of replicas open"
        return max(low, min(high, int(plan["replicas_target"]))), "the controller's plan"
    if inflight is None or not math.isfinite(inflight):
        return held, "held: no fresh plan, and no replica reports its open requests"
    wanted = math.ceil(inflight / inflight_target)
    if wanted <= held:
        return held, "held: no fresh plan, and without one the number never falls"
    return max(low, min(high, wanted)), f"no fresh plan, and more than {inflight_target} open requests per replica"


class FollowedPlan:
    """The last plan received and its age; the rules of ``policies.plan_follower``, which cannot be imported here."""

    def __init__(self) -> None:
        self._plan: Mapping[str, Any] | None = None
        self._received_ns = 0

    def receive(self, plan: Mapping[str, Any], now_ns: int) -> None:
        """Take a plan unless the one held is the same or a later one of the same controller."""
        held = self._plan
        if held is not None and held["epoch"] == plan["epoch"] and plan["seq"] <= held["seq"]:
            return
        self._plan, self._received_ns = plan, now_ns

    def current(self, now_ns: int) -> Mapping[str, Any] | None:
        """The plan in force; ``None`` before the first and after its time."""
        if self._plan is None or (now_ns - self._received_ns) / 1e6 > self._plan["ttl_ms"]:
            return None
        return self._plan


class RoomWatch:
    """Counts replicas that Ray finds no room for, from how long their names have been waiting."""

    def __init__(self) -> None:
        self._since_ns: dict[str, int] = {}

    def count(self, groups: Mapping[str, str], actors: Collection[str], now_ns: int) -> int:
        """Replicas that wait for room for too long.

        Args:
            groups: state of each placement group of the deployment, by name.
            actors: names of its actors that Ray has not started yet.
            now_ns: monotonic time.
        """
        unplaced = {name for name, state in groups.items() if state in {"PENDING", "RESCHEDULING"}}
        waiting = unplaced | {name for name in actors if name not in groups}
        self._since_ns = {name: self._since_ns.get(name, now_ns) for name in waiting}
        limits = {name: UNPLACED_S if name in unplaced else UNSTARTED_S for name in waiting}
        return sum(now_ns - since_ns >= limits[name] * 1e9 for name, since_ns in self._since_ns.items())


class PlanFollowingPolicy:
    """Callable Serve builds once per deployment and calls several times a second.

    Args:
        actor_prefix: start of the controller actor's Ray name, with ``{app}`` for the application's name.
        actor_suffix: end of that name; between the two stands a version that Serve chooses.
        namespace: Ray namespace the actor lives in.
        model: name of the deployment's model.
        inflight_target: open requests per replica of the local rule.
        acting: ``False`` where the configuration says shadow or switched scaling off: the number is left alone
            without a plan.
    """

    def __init__(
        self,
        actor_prefix: str,
        actor_suffix: str,
        namespace: str,
        model: str = "",
        inflight_target: int = 8,
        acting: bool = True,
    ) -> None:
        self._prefix, self._suffix, self._namespace = actor_prefix, actor_suffix, namespace
        self._model = model
        self._inflight_target = max(1, inflight_target)
        self._acting = acting
        self._followed = FollowedPlan()
        self._controller: Any = None
        self._exchange: threading.Thread | None = None
        self._exchanged_ns: int | None = None
        self._told: tuple[int, str] | None = None
        self._alone_since_ns: int | None = None
        """Since when there has been no fresh plan."""
        self._room = RoomWatch()

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Serve's question; never blocks."""
        now_ns = time.monotonic_ns()
        view = {
            "replicas_running": ctx.current_num_replicas,
            "replicas_target": ctx.target_num_replicas,
            "replicas_min": ctx.capacity_adjusted_min_replicas,
            "replicas_max": ctx.capacity_adjusted_max_replicas,
        }
        self._start_exchange(view, ctx.app_name or "", ctx.deployment_name, now_ns)
        replicas, why = self._answer(ctx, now_ns)
        if (replicas, why) != self._told:
            self._told = (replicas, why)
            logger.info("%s of %s: %d replicas; %s.", ctx.deployment_name, ctx.app_name, replicas, why)
        return replicas, {}

    def receive(self, plan: Mapping[str, Any], now_ns: int) -> None:
        """Take a plan of the controller, as plain values."""
        self._followed.receive(plan, now_ns)

    def _answer(self, ctx: AutoscalingContext, now_ns: int) -> tuple[int, str]:
        bounds = (ctx.capacity_adjusted_min_replicas, ctx.capacity_adjusted_max_replicas)
        plan = self._followed.current(now_ns)
        if plan is None and not self._acting:
            held = max(bounds[0], min(bounds[1], ctx.target_num_replicas))
            return held, "held: no fresh plan, and the configuration says shadow or scaling off"
        if plan is not None:
            self._alone_since_ns = None
        elif self._alone_since_ns is None:
            self._alone_since_ns = now_ns
        elif ctx.target_num_replicas < 1 <= bounds[1] and now_ns - self._alone_since_ns > WAKE_AFTER_S * 1e9:
            return 1, "no fresh plan: nobody else would wake a model that sleeps"
        inflight = None if plan is not None else _inflight(ctx.aggregated_metrics)
        return decide(plan, ctx.target_num_replicas, bounds, inflight, self._inflight_target)

    def _start_exchange(self, view: dict[str, int], app: str, deployment: str, now_ns: int) -> None:
        if self._exchange is not None and self._exchange.is_alive():
            return
        if self._exchanged_ns is not None and now_ns - self._exchanged_ns < EXCHANGE_PERIOD_S * 1e9:
            return
        self._exchanged_ns = now_ns
        self._exchange = threading.Thread(
            target=self._do_exchange, args=(view, app, deployment), name="tidegate-exchange", daemon=True
        )
        self._exchange.start()

    def _do_exchange(self, view: dict[str, int], app: str, deployment: str) -> None:
        """Tell the controller what Serve says and take its plan; runs in its own thread and ends within seconds."""
        try:
            if self._controller is None:
                self._controller = self._find(app)
            if self._controller is None:
                return
            view["unschedulable"] = self._unschedulable(view, app, deployment)
            reply = self._controller.fleet.remote(view, self._model).future().result(timeout=EXCHANGE_TIMEOUT_S)
            if reply is not None:
                self._followed.receive(reply, time.monotonic_ns())
        except Exception as error:  # noqa: BLE001 - whatever Ray raises, the controller is gone: look it up again
            self._controller = None
            logger.info("No answer of the controller actor of %s: %s.", app, type(error).__name__)

    def _unschedulable(self, view: Mapping[str, int], app: str, deployment: str) -> int:
        """Replicas without room; asks Ray only while replicas are missing (a few milliseconds)."""
        import ray

        groups, actors = {}, []
        if view["replicas_running"] < view["replicas_target"] and ray.is_initialized():
            prefix = f"{REPLICA_PREFIX}{app}#{deployment}#" if app else f"{REPLICA_PREFIX}{deployment}#"
            try:
                groups = {name: state for name, state in placement_groups().items() if name.startswith(prefix)}
                actors = [name for name in actors_to_start() if name.startswith(prefix)]
            except Exception as error:  # noqa: BLE001 - whatever Ray raises, the exchange goes on without this figure
                logger.debug("Ray does not say who waits for room: %r.", error)
        return self._room.count(groups, actors, time.monotonic_ns())

    def _find(self, app: str) -> Any:
        import ray
        from ray.util import list_named_actors

        if not ray.is_initialized():
            return None
        prefix = self._prefix.replace("{app}", app)
        names = sorted(
            actor["name"]
            for actor in list_named_actors(all_namespaces=True)
            if actor["namespace"] == self._namespace
            and actor["name"].startswith(prefix)
            and actor["name"].endswith(self._suffix)
        )
        return ray.get_actor(names[-1], namespace=self._namespace) if names else None


def placement_groups() -> dict[str, str]:
    """State of every placement group of the cluster that is not removed, by name."""
    from ray.util import placement_group_table

    rows = placement_group_table().values()
    return {row["name"]: row["state"] for row in rows if row["state"] != "REMOVED"}


def actors_to_start() -> list[str]:
    """Names of the cluster's actors that wait for room, or for their process to start."""
    from ray._private.state import state

    rows = state.actor_table(None, actor_state_name="PENDING_CREATION").values()
    return [row["Name"] for row in rows if row["Name"]]


def _inflight(metrics: Mapping[str, Mapping[Any, float]] | None) -> float | None:
    """Sum of :data:`INFLIGHT_METRIC` over the replicas that reported it; ``None`` when none has."""
    reported = (metrics or {}).get(INFLIGHT_METRIC)
    return sum(reported.values()) if reported else None


def autoscaling_config(settings: Settings) -> dict[str, Any]:
    """Serve's ``autoscaling_config`` of the engine deployment.

    A model that may sleep starts once with its deployment: that shows that it can, and how long it takes. Delays 0 and
    factors 1, so that Serve passes the policy's answer on as it is. The metrics interval is set here although Serve
    calls it deprecated: in 2.60 replicas read it from here and from nowhere else.
    """
    from deployments.controller_actor import ACTOR_NAME, OWNER_DEPLOYMENT
    from deployments.serve_internals import SERVE_NAMESPACE, actor_name_parts

    prefix, suffix = actor_name_parts("{app}", OWNER_DEPLOYMENT, ACTOR_NAME)
    scaling = settings.scaling
    return {
        "min_replicas": scaling.replicas_min,
        "initial_replicas": max(1, scaling.replicas_min),
        "max_replicas": scaling.replicas_max,
        "metrics_interval_s": METRICS_INTERVAL_S,
        "look_back_period_s": LOOK_BACK_S,
        "upscale_delay_s": 0.0,
        "downscale_delay_s": 0.0,
        "upscaling_factor": 1.0,
        "downscaling_factor": 1.0,
        "policy": {
            "policy_function": POLICY_PATH,
            "policy_kwargs": {
                "actor_prefix": prefix,
                "actor_suffix": suffix,
                "namespace": SERVE_NAMESPACE,
                "model": settings.model.name,
                "inflight_target": scaling.inflight_target,
                "acting": scaling.enabled and settings.control.mode == "act",
            },
        },
    }
