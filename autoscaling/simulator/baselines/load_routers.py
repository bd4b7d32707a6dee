"""Routers that look at load alone, or at nothing: round robin, random, power of two choices, least tokens.

Sources:

* round robin, random: policies ``round_robin`` and ``random`` of vllm-router 0.1.17 (README, "Load balancing policies";
  ``src/policies``): a counter modulo the healthy workers, a uniform draw.
* power of two: Ray Serve 2.60, ``ray/serve/_private/request_router/pow_2_router.py`` and ``request_router.py``
  (``_select_from_candidate_replicas``): two different replicas at random, the shorter queue of the two, the first of
  equals; replicas at ``max_ongoing_requests`` are left out, and when both are the procedure starts again. A queue is
  what the replica last said, plus what this router sent since, less what it saw end. Ray Serve LLM sets
  ``max_ongoing_requests`` to 1e9 (``ray/llm/_internal/serve/constants.py``): no limit.
* least tokens: ``--load-balance-method total_tokens`` of SGLang's data-parallel controller (server arguments): the
  worker with the fewest tokens, waiting and held, in equal cases fewest requests.

What this must not do: look at prefixes, or remember requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from autoscaling.simulator.baselines.choices import (
    QUEUE_AGE_MS_MAX,
    available,
    choice,
    nobody,
    queue_length,
)
from policies.routing.predict import joined_load
from policies.routing.strategy import RoutingStrategy
from policies.types import ReplicaId, ReplicaView, Request, RouteChoice


class LoadRouter(RoutingStrategy):
    """Base of routers to which every request is alike, and which remember nothing of requests and replicas."""

    def choose(
        self,
        request: Request,  # noqa: ARG002 - every request is alike
        views: Sequence[ReplicaView],
        strength: float | None,  # noqa: ARG002 - prefixes are not looked at
        now_ns: int,  # noqa: ARG002 - views carry their ages already
    ) -> RouteChoice:
        """What :meth:`_pick` says of the replicas that may be chosen; nobody where there are none."""
        ready = available(views)
        return (self._pick(ready) if ready else None) or nobody(views)

    def _pick(self, ready: list[ReplicaView]) -> RouteChoice | None:
        """Choose among ``ready``, at least one; ``None``: none of them has room."""
        raise NotImplementedError

    def dispatched(self, request: Request, replica_id: ReplicaId) -> None:
        """Nothing to remember."""

    def forget(self, replica_id: ReplicaId) -> None:
        """Nothing to forget."""


class RoundRobin(LoadRouter):
    """One replica after the other, in the order of their ids. Each gateway starts at a place of its own."""

    def __init__(self, rng: Random) -> None:
        self._next = rng.randrange(1 << 16)

    def _pick(self, ready: list[ReplicaView]) -> RouteChoice:
        """The next replica."""
        place = self._next % len(ready)
        self._next += 1
        return choice([ready[place].replica_id], "round_robin", f"number {place} of {len(ready)}")


class RandomChoice(LoadRouter):
    """Any replica, all alike."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def _pick(self, ready: list[ReplicaView]) -> RouteChoice:
        """One replica, drawn evenly."""
        return choice([ready[self._rng.randrange(len(ready))].replica_id], "random", f"any of {len(ready)}")


class PowerOfTwo(LoadRouter):
    """The shorter queue of two replicas drawn at random.

    Args:
        rng: draws the pair.
        ongoing_max: Serve's ``max_ongoing_requests``; ``None``: no limit, Ray Serve LLM's default.
    """

    def __init__(self, rng: Random, ongoing_max: int | None = None) -> None:
        self._rng = rng
        self._ongoing_max = ongoing_max

    def _pick(self, ready: list[ReplicaView]) -> RouteChoice | None:
        """Both of the pair, the shorter queue first."""
        ready = self.not_full(ready)
        if not ready:
            return None
        first = self._rng.randrange(len(ready))
        pair = [ready[first]]
        if len(ready) > 1:
            second = self._rng.randrange(len(ready) - 1)
            pair.append(ready[second + (second >= first)])
        pair.sort(key=queue_length)
        text = " against ".join(f"{v.replica_id} with {queue_length(v)} ongoing" for v in pair)
        return choice([v.replica_id for v in pair], "power_of_two", text)

    def not_full(self, ready: list[ReplicaView]) -> list[ReplicaView]:
        """Those below ``ongoing_max``. Ray draws again and again until one of the pair has room: the same draw."""
        if self._ongoing_max is None:
            return ready
        return [v for v in ready if queue_length(v) < self._ongoing_max]


class LeastTokens(LoadRouter):
    """Fewest tokens, waiting and held; then fewest requests; then any."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    def _pick(self, ready: list[ReplicaView]) -> RouteChoice:
        """The replica with the fewest tokens."""
        loads = {v.replica_id: _tokens(v) for v in ready}
        least = min(loads.values())
        equals = [r for r, load in loads.items() if load == least]
        chosen = equals[self._rng.randrange(len(equals))] if len(equals) > 1 else equals[0]
        return choice([chosen], "least_tokens", f"{least[0]:,} tokens in {least[1]} requests")


def _tokens(view: ReplicaView) -> tuple[int, int]:
    load = joined_load(view, QUEUE_AGE_MS_MAX)
    return load.prefill_tokens + load.kv_tokens, load.requests
