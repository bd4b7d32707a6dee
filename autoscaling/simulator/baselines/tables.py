"""Baselines by name, for scenarios, tables and command lines.

``ROUTERS`` maps a name to the factory of one gateway's router; ``None`` is the live router. Ray's prefix tree is shared
by all routers of a deployment: :func:`router_for_run` makes a factory whose routers share one, and is what a run with
several gateways should use; the entry in ``ROUTERS`` gives each gateway a tree of its own.

``SCALERS`` maps a name to the factory of one pool's scaler with its project's defaults; ``None`` is a fixed number. The
``dynamo_load`` there learns engines from the replicas' step models; ``dynamo.dynamo_scaler`` takes a profile and a
role.

:func:`as_users_run_it` is the configuration of a run with a baseline: none of Tidegate's own loops acts on engines or
routing, and vLLM keeps its start-up batch settings.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.baselines.cache_aware import CacheAware
from autoscaling.simulator.baselines.dynamo import dynamo_scaler
from autoscaling.simulator.baselines.hash_ring import ConsistentHashing
from autoscaling.simulator.baselines.hpa import HpaScaler
from autoscaling.simulator.baselines.kpa import KpaScaler
from autoscaling.simulator.baselines.load_routers import LeastTokens, PowerOfTwo, RandomChoice, RoundRobin
from autoscaling.simulator.baselines.ray_prefix import RayPrefixAffinity, SharedTree
from autoscaling.simulator.baselines.ray_serve import RayServeScaler
from autoscaling.simulator.spec import RouterFactory, ScalerFactory
from policies.config import PolicyConfig
from policies.routing.prefix_index import PrefixIndex
from policies.routing.strategy import RoutingStrategy


def round_robin(_config: PolicyConfig, _index: PrefixIndex, rng: Random) -> RoutingStrategy:
    """One replica after the other."""
    return RoundRobin(rng)


def random_choice(_config: PolicyConfig, _index: PrefixIndex, rng: Random) -> RoutingStrategy:
    """Any replica."""
    return RandomChoice(rng)


def power_of_two(_config: PolicyConfig, _index: PrefixIndex, rng: Random) -> RoutingStrategy:
    """Ray Serve's default."""
    return PowerOfTwo(rng)


def least_tokens(_config: PolicyConfig, _index: PrefixIndex, rng: Random) -> RoutingStrategy:
    """Fewest tokens, waiting and held."""
    return LeastTokens(rng)


def ray_prefix_affinity(_config: PolicyConfig, _index: PrefixIndex, rng: Random) -> RoutingStrategy:
    """Ray Serve LLM's prefix-aware router, alone with its tree."""
    return RayPrefixAffinity(SharedTree(), rng)


def cache_aware(_config: PolicyConfig, _index: PrefixIndex, _rng: Random) -> RoutingStrategy:
    """vllm-router's default."""
    return CacheAware()


def consistent_hashing(_config: PolicyConfig, _index: PrefixIndex, _rng: Random) -> RoutingStrategy:
    """KubeAI's prefix hash with bounded loads."""
    return ConsistentHashing()


ROUTERS: dict[str, RouterFactory | None] = {
    "tidegate": None,
    "round_robin": round_robin,
    "random": random_choice,
    "power_of_two": power_of_two,
    "least_tokens": least_tokens,
    "ray_prefix_affinity": ray_prefix_affinity,
    "cache_aware": cache_aware,
    "consistent_hashing": consistent_hashing,
}
"""Routers by name; ``tidegate`` is the live one."""


def router_for_run(name: str) -> RouterFactory | None:
    """A factory for the gateways of one run. Raises ``KeyError`` for a name that is not in ``ROUTERS``."""
    if name != "ray_prefix_affinity":
        return ROUTERS[name]
    shared = SharedTree()

    def ray_prefix_affinity_shared(_config: PolicyConfig, _index: PrefixIndex, rng: Random) -> RoutingStrategy:
        return RayPrefixAffinity(shared, rng)

    return ray_prefix_affinity_shared


SCALERS: dict[str, ScalerFactory | None] = {
    "tidegate": ReplicaScaler,
    "fixed": None,
    "ray_serve": RayServeScaler,
    "hpa": HpaScaler,
    "kpa": KpaScaler,
    "dynamo_load": dynamo_scaler(),
}
"""Scalers by name; ``tidegate`` is the live one, ``fixed`` none."""


def as_users_run_it(config: PolicyConfig) -> PolicyConfig:
    """``config`` without Tidegate's batch tuner, affinity loop and the queue of its gateways."""
    return replace(
        config,
        batching=replace(config.batching, enabled=False),
        affinity=replace(config.affinity, enabled=False),
        admission=replace(config.admission, engine_wait_share=None),
    )
