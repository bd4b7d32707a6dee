"""Which replicas compute prompts and which write answers, and for which requests that is done apart.

Roles are labels: every engine can do both, so a role changes from one request to the next and nothing is restarted::

    prefill replicas = the n members of highest rendezvous score       n: plan, else configuration; at most members - 1

Members that stand by (``Plan.warm``) are none: nobody sends to them. All gateways name the same ones without talking,
and when one leaves, the others keep their roles. The rest decode, and do everything else as well. One request is split
where

    its prompt has uncached_tokens_min uncached tokens at the best decode replica, or more,
    a prefill replica takes requests, and so does a decode replica,
    TTFT predicted at the prefill replica <= max(that at the decode replica, the objective)

and otherwise goes whole to the best replica that decodes; to one that prefills only where nobody else is left.

What this must not do: count load, carry anything, or decide how many replicas prefill (``disaggregation.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum

from policies.config import PolicyConfig
from policies.faults import PROBATION
from policies.routing.rendezvous import score
from policies.types import Plan, Reason, ReplicaId, Request, RouteChoice

ROLES_KEY = 0x70726566696C6C
"""What roles are drawn by."""


class SplitCode(StrEnum):
    """What became of a request in a fleet with roles; label of ``tidegate_disaggregation_total``."""

    SPLIT = "split"
    """Prompt and answer at two replicas."""
    SHORT = "short_prompt"
    """Too few uncached prompt tokens."""
    UNSUITED = "unsuited"
    """Its form allows no handing over: several answers, a forced tool, an endpoint without it."""
    NO_PREFILL = "no_prefill_replica"
    """None, or none that takes requests."""
    NO_DECODE = "no_decode_replica"
    """Likewise."""
    BUSY = "prefill_busy"
    """The prefill replica would answer too late."""
    AGAIN = "tried_before"
    """It failed somewhere already, and is sent whole; so is one that tries a replica on probation."""
    PREFILL_FAILED = "prefill_failed"
    """The prefill replica refused, broke off, or answered with an error."""
    PREFILL_TIMEOUT = "prefill_timeout"
    """The prefill replica took too long."""
    PULL_FAILED = "pull_failed"
    """The decode replica answered with an error; asked again without the handed over cache."""
    PULL_TIMEOUT = "pull_timeout"
    """The decode replica gave no byte in time, likewise."""
    RECOMPUTED = "recomputed"
    """The decode engine could not pull, and computed the prompt itself."""


@dataclass(frozen=True, slots=True)
class SplitChoice:
    """The answer for one request."""

    code: SplitCode
    text: str
    choice: RouteChoice
    """Where it goes whole: replicas that decode before those that prefill."""
    prefill_id: ReplicaId | None = None
    """Where its prompt is computed first; set with ``SPLIT`` only."""


class Roles:
    """Who prefills, drawn anew only where members or their number change."""

    def __init__(self, config: PolicyConfig) -> None:
        self._config = config.disaggregation
        self._drawn: tuple[Collection[ReplicaId], int, frozenset[ReplicaId]] = ((), 0, frozenset())
        self._prefill: frozenset[ReplicaId] = frozenset()

    def prefill(self, members: Collection[ReplicaId], plan: Plan | None) -> frozenset[ReplicaId]:
        """The members that prefill; none in a fleet of one. Members that are the same: the same object."""
        if not self._config.enabled:
            return frozenset()
        asked = plan.prefill_replicas if plan is not None else None
        asked = self._config.prefill_replicas if asked is None else asked
        warm = plan.warm if plan is not None else frozenset()
        if self._drawn[0] is not members or self._drawn[1:] != (asked, warm):
            self._drawn = members, asked, warm
            able = sorted((r for r in members if r not in warm), key=lambda r: (-score(ROLES_KEY, r), r))
            self._prefill = frozenset(able[: max(0, min(asked, len(able) - 1))])
        return self._prefill


def decide(
    choice: RouteChoice, prefill: Collection[ReplicaId], request: Request, uncached_tokens_min: int, ttft_ms: float
) -> SplitChoice:
    """Whether ``request``, ranked by ``choice`` over all replicas, is split. ``ttft_ms``: its objective."""
    whole = decode_first(choice, prefill)
    order = whole.order
    if choice.reason.code == PROBATION:
        return SplitChoice(SplitCode.AGAIN, "it tries a replica on probation", choice)
    to_prefill = next((r for r in order if r in prefill), None)
    to_decode = next((r for r in order if r not in prefill), None)
    if to_decode is None:
        return SplitChoice(SplitCode.NO_DECODE, "no replica that decodes takes requests", whole)
    uncached = request.prompt_tokens - choice.predicted_hit_tokens.get(to_decode, 0)
    if uncached < uncached_tokens_min:
        text = f"{uncached:,} uncached prompt tokens, below {uncached_tokens_min:,}"
        return SplitChoice(SplitCode.SHORT, text, whole)
    if to_prefill is None:
        return SplitChoice(SplitCode.NO_PREFILL, "no replica that prefills takes requests", whole)
    there, here = choice.predicted_ttft_ms.get(to_prefill, 0.0), choice.predicted_ttft_ms.get(to_decode, 0.0)
    words = f"{there:,.0f} ms at the prefill replica, {here:,.0f} ms at the decode replica"
    if there > max(here, ttft_ms):
        return SplitChoice(SplitCode.BUSY, words, whole)
    return SplitChoice(SplitCode.SPLIT, f"{uncached:,} uncached prompt tokens; {words}", whole, to_prefill)


def decode_first(choice: RouteChoice, prefill: Collection[ReplicaId]) -> RouteChoice:
    """The same order, with replicas that prefill behind all others."""
    tiers = [
        tuple(r for r in tier if (r in prefill) is behind) for behind in (False, True) for tier in choice.tiers
    ]  # fmt: skip
    moved = tuple(tier for tier in tiers if tier)
    return choice if moved == choice.tiers else replace(choice, tiers=moved)


def without_prompt(request: Request) -> Request:
    """The request as a decode replica sees it once the prompt is computed elsewhere: nothing to compute."""
    return replace(request, prompt_tokens=1, blocks=())


def handed_over(choice: RouteChoice, prefill: Collection[ReplicaId], request: Request) -> RouteChoice:
    """Where the answer is written: ``choice`` for :func:`without_prompt`, with the whole prompt taken as held."""
    ordered = decode_first(choice, prefill)
    if not ordered.tiers:
        return ordered
    text = f"prompt computed elsewhere; {choice.reason.text}"
    hits = dict.fromkeys(ordered.predicted_ttft_ms, request.prompt_tokens)
    return begun(replace(ordered, reason=Reason("handed_over", text), predicted_hit_tokens=hits))


def begun(choice: RouteChoice) -> RouteChoice:
    """The same without forecasts: nobody is refused for being late once work on the prompt has begun."""
    return replace(choice, predicted_ttft_ms={})
