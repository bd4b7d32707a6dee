"""Which of two knobs may move now: the one that somebody reaches, by a law that was seen to hold there.

A cap far above what runs, with nobody waiting, holds up nobody, wherever it stands; a token budget is used by prompts
alone. While a knob is out of reach, a change of it gains nothing, and its value is a guess far from what is seen: it
stays. The same where the step model has not seen unlike batches (cap) or prompts (budget) since the engine started.
But a cap may rise while requests wait: below one that somebody lowered, no other batch would ever be seen::

    cap      moves where min(before, after) <= REACH * running at once, or requests wait, or preemptions brake it
    budget   moves where prompts came in the window, or there is none yet, or those that run need a larger one
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.batching.solve import BatchPoint
from policies.types import Knobs

REACH = 2.0
"""A cap more than this times above what runs is out of reach."""


@dataclass(frozen=True, slots=True)
class Reach:
    """What is there of the load."""

    running: float
    """Most sequences at once, seen in the window or to be expected of the load."""
    waiting: float
    """Requests that wait in the engine or in front of it."""
    prompts: bool
    """Prompts were computed in the window."""
    braked: bool
    """Preemptions hold the cap."""
    tokens_min: int
    """Least budget with which those that run decode and a prompt progresses."""


def within_reach(before: Knobs, after: Knobs, point: BatchPoint, reach: Reach) -> Knobs:
    """``after``, with what stands (``before``) where a knob must not move; complete."""
    seqs, tokens = after.running_seqs_max or point.running_seqs_hard, after.step_tokens_max or point.step_tokens_hard
    stand_seqs = before.running_seqs_max or point.running_seqs_hard
    stand_tokens = before.step_tokens_max or point.step_tokens_hard
    reached = reach.waiting > 0 or min(stand_seqs, seqs) <= REACH * reach.running
    known = point.model.batch_known or (reach.waiting > 0 and seqs > stand_seqs)
    if not reach.braked and not (reached and known):
        seqs = stand_seqs
    used = before.step_tokens_max is None or reach.prompts
    if stand_tokens >= reach.tokens_min and not (used and point.model.prompts_known):
        tokens = stand_tokens
    return Knobs(running_seqs_max=seqs, step_tokens_max=tokens)
