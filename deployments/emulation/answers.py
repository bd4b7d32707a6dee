"""What the emulated engine will say: the whole answer to a prompt, known before its first token is due.

The toy model is a function of prompt and seed, so stop strings, lengths and finish reasons are settled here once, and
streaming is a matter of cutting the known text at the known tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from deployments.emulation.tokens import MESSAGE_END, TextDecoder, prompt_seed, write_text


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """How answers are made. ``tokens_max`` is at least 1."""

    tokens_max: int
    tokens_min: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    keep_stop: bool = False
    """The stop string stays in the text."""
    ignore_end: bool = False
    """The model does not stop by itself."""
    json_object: bool = False
    words: str = "lorem"
    engine_seed: int = 0
    request_seed: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice."""

    tokens: list[int]
    """At least one; the last may be the end of the message, which has no text."""
    deltas: list[str]
    """Text that each token adds; stop strings are never sent and then taken back."""
    finish_reason: str
    stop_reason: str | int | None

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(self.deltas)


def make_answer(prompt: Sequence[int], rules: AnswerRules, choice: int = 0) -> Answer:
    """The ``choice``-th answer to ``prompt``."""
    seed = prompt_seed(prompt, rules.engine_seed, rules.request_seed, choice)
    tokens = write_text(seed, rules.words, rules.tokens_max, not rules.ignore_end, rules.json_object)
    if not rules.ignore_end:
        if len(tokens) < rules.tokens_min and not rules.json_object:
            tokens = write_text(seed, rules.words, rules.tokens_min, ends=False)
        tokens = [*tokens, MESSAGE_END]
    tokens = tokens[: rules.tokens_max]
    ended = tokens[-1] == MESSAGE_END
    deltas = _deltas(tokens)
    answer = Answer(tokens, deltas, "stop" if ended else "length", None)
    return _stopped(answer, rules)


def _deltas(tokens: Sequence[int]) -> list[str]:
    decoder = TextDecoder()
    deltas = ["" if token == MESSAGE_END else decoder.add(token) for token in tokens]
    deltas[-1] += decoder.end()
    return deltas


def _stopped(answer: Answer, rules: AnswerRules) -> Answer:
    """Cut an answer at its first stop token or stop string, none of which counts before ``tokens_min``."""
    if not rules.stop and not rules.stop_token_ids:
        return answer
    text, longest = "", max((len(s) for s in rules.stop), default=0)
    for i, (token, delta) in enumerate(zip(answer.tokens, answer.deltas, strict=True)):
        searched_from = max(0, len(text) - longest + 1)
        text += delta
        if i + 1 < rules.tokens_min:
            continue
        if token in rules.stop_token_ids:
            return _cut(answer, i + 1, len(text), token)
        found = [(at, s) for s in rules.stop if (at := text.find(s, searched_from)) >= 0]
        if found:
            at, stop = min(found)
            return _cut(answer, i + 1, at + len(stop) if rules.keep_stop else at, stop)
    return answer


def _cut(answer: Answer, tokens: int, chars: int, reason: str | int) -> Answer:
    deltas, left = [], chars
    for delta in answer.deltas[:tokens]:
        deltas.append(delta[:left])
        left = max(0, left - len(delta))
    return Answer(answer.tokens[:tokens], deltas, "stop", reason)
