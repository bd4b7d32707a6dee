"""Who can serve a request as promised, and where one goes that nobody can.

A replica *keeps the promise* for a request when::

    predicted TTFT                                             <= TTFT_SHARE  * objectives.ttft_ms
    decode step with the request and its whole prompt in it    <= DECODE_SHARE * objectives.itl_ms

The rest of the TTFT objective is for what a prediction cannot know, the rest of the gap for prompts that join later.

Where nobody keeps it (more load than the fleet carries, or a prompt too long for any), least TTFT would be the worst of
choices: it spreads the surplus until *every* replica is just too late, and a fleet that could have served most of its
requests in time serves none. So the request joins those that are late already: of the replicas where even an empty
prompt would be late, the latest one, up to ``late_ms_max``; then the next. The others stay in time for requests that
can still be served. No request is refused for this, and the longest wait stays bounded. Where no replica is late yet,
or one has nothing to do, there is nothing to protect: the order stands.

What this must not do: refuse, or know of admission.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from policies.config import ObjectivesConfig
from policies.routing.predict import Estimate, Standing
from policies.types import ReplicaId, Request

TTFT_SHARE = 0.75
"""Share of the TTFT objective that a prediction may fill."""

DECODE_SHARE = 0.5
"""Share of the ITL objective that decoding alone may fill: prompts that join take about as much again."""


@dataclass(frozen=True, slots=True)
class Promise:
    """What requests were promised, as routing counts it."""

    ttft_ms: float
    gap_ms: float
    late_ms_max: float
    """No request is sent where it is predicted to wait longer, while there is anybody else."""

    def kept(self, request: Request, estimate: Estimate, standing: Standing) -> bool:
        """Whether a replica would serve ``request`` in time."""
        return estimate.ttft_ms <= self.ttft_ms and standing.gap_ms(request.prompt_tokens) <= self.gap_ms

    def late(self, standing: Standing) -> bool:
        """Whether whatever is sent there comes late."""
        return standing.ttft_ms(1.0) > self.ttft_ms


def promise(objectives: ObjectivesConfig, late_ms_max: float) -> Promise:
    """The promise behind ``objectives``."""
    return Promise(objectives.ttft_ms * TTFT_SHARE, objectives.itl_ms * DECODE_SHARE, late_ms_max)


def by_promise(
    given: Promise,
    request: Request,
    order: Sequence[ReplicaId],
    estimates: Mapping[ReplicaId, Estimate],
    standings: Mapping[ReplicaId, Standing],
) -> tuple[list[ReplicaId], bool]:
    """``order`` with those that keep the promise first; with the late ones first, latest ahead, where nobody does.

    The second value says that nobody does and somebody is late.
    """
    kept = [r for r in order if given.kept(request, estimates[r], standings[r])]
    if kept:
        return (kept + [r for r in order if r not in kept] if len(kept) < len(order) else list(order)), False
    late = [r for r in order if estimates[r].ttft_ms <= given.late_ms_max and given.late(standings[r])]
    if not late or any(not standings[r].requests for r in order):
        return list(order), False
    late.sort(key=lambda r: -estimates[r].ttft_ms)
    return late + [r for r in order if r not in late], True
