"""Drafts of one sequence by n-gram lookup, as vLLM's ``ngram`` method makes them: what followed the last tokens before.

The last :data:`NGRAM` tokens are looked up in everything before them, the latest occurrence wins, and what followed it
is the draft. Text that repeats itself is drafted well, other text hardly ever. Whether a draft comes true is known from
the answer, so acceptance is never drawn. :class:`LiveDepth` says how deep each step drafts, as the live scheduler does
(``deployments/scheduler.py``): drafts made in one step are verified in the next.

Source: vLLM 0.29, ``vllm/v1/spec_decode/ngram_proposer.py`` (which takes the longest n-gram within bounds and its first
occurrence).
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.speculation import Bounds, DepthExplorer

NGRAM = 3
"""Tokens that must have occurred in this order before."""


class Drafter:
    """Index of one growing text; memory grows with its length."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self._text = list(prompt)
        self._after: dict[tuple[int, ...], int] = {}
        """Place after the latest occurrence of each n-gram but the last."""
        self._indexed = NGRAM

    def add(self, tokens: Sequence[int]) -> None:
        """The text goes on with ``tokens``."""
        self._text += tokens

    def propose(self, depth: int) -> list[int]:
        """At most ``depth`` tokens that may come next; empty where the last ones are new."""
        text = self._text
        for end in range(self._indexed, len(text)):
            self._after[tuple(text[end - NGRAM : end])] = end
        self._indexed = max(self._indexed, len(text))
        place = self._after.get(tuple(text[-NGRAM:])) if depth > 0 else None
        return [] if place is None else text[place : place + depth]


class LiveDepth:
    """Depth of one engine's drafts: the one asked for, and now and then another, to learn what it is worth."""

    def __init__(self, hard: int) -> None:
        """``hard`` is the start-up depth; 0: the engine does not speculate."""
        self.hard = hard
        self.asked: int | None = hard or None
        """In force; ``None``: the engine does not speculate."""
        self._explorer = DepthExplorer(hard)
        self._next = hard

    def begin(self, asked: int | None, bounds: Bounds, running: int) -> int:
        """A step of ``running`` sequences begins: the depth of the drafts it verifies."""
        if not self.hard:
            return 0
        depth = self._next
        self.asked = max(0, min(self.hard if asked is None else asked, self.hard))
        self._next = self._explorer.choose(self.asked, bounds, running)
        return depth

    def ran(self, depth: int, seqs: int, tokens: int, step_ms: float) -> None:
        """A step that only decoded ended."""
        if self.hard:
            self._explorer.ran(depth, seqs, tokens, step_ms)
