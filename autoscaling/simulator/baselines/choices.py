"""What all baseline routers share: who may be chosen, how a choice is written down, how long a queue looks.

What this must not do: rank anybody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.routing.predict import joined_load
from policies.types import Reason, ReplicaId, ReplicaView, Request, RouteChoice

CHARS_PER_TOKEN = 4
"""Characters of one prompt token: routers that count characters see this many (the gateways' own first estimate)."""

QUEUE_AGE_MS_MAX = 10_000.0
"""A replica's word on its queue is used for this long, as by Ray Serve (``RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S``)."""


def available(views: Sequence[ReplicaView]) -> list[ReplicaView]:
    """Replicas that may be chosen, in the order given."""
    return [v for v in views if v.available]


def nobody(views: Sequence[ReplicaView]) -> RouteChoice:
    """The empty choice, with its reason."""
    why = ", ".join(f"{v.replica_id} {v.unavailable_reason or 'unavailable'}" for v in views)
    return RouteChoice((), Reason("none_available", why or "no replica is known"), {}, {})


def choice(
    order: Sequence[ReplicaId], code: str, text: str, hit_tokens: Mapping[ReplicaId, int] | None = None
) -> RouteChoice:
    """Replicas to try, best first. Baselines predict no TTFT; ``hit_tokens`` are prompt tokens believed cached."""
    return RouteChoice(tuple((r,) for r in order), Reason(code, text), {}, hit_tokens or {})


def queue_length(view: ReplicaView) -> int:
    """Ongoing requests of a replica as a Ray Serve router knows them: the replica's last word and its own since."""
    return joined_load(view, QUEUE_AGE_MS_MAX).requests


def prompt_chars(request: Request) -> int:
    """Length of the prompt in characters, at least 1."""
    return max(1, request.prompt_tokens * CHARS_PER_TOKEN)
