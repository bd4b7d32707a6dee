"""What the emulated engine will say: the whole answer to a prompt, known before its first token is due.

The toy model is a function of prompt and seed, so stop strings, lengths and finish reasons are settled here once, and
streaming is a matter of cutting the known text at the known tokens. A prompt that ends with the beginning of an answer
gets the rest of that answer, as from any model that is asked at temperature 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from deployments.emulation.tokens import (
    MESSAGE_END,
    TextDecoder,
    answer_key,
    answer_seed,
    answer_start,
    decode,
    natural_length,
    word_pool,
    write_json,
    write_tokens,
)


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
    repeat_marker: str | None = None
    """Where the prompt contains this, the first word is all there is."""
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
    """The ``choice``-th answer to ``prompt``, or the rest of it when the prompt ends with its beginning."""
    tokens = _tokens(prompt, rules, choice)[: rules.tokens_max]
    ended = tokens[-1] == MESSAGE_END
    answer = Answer(tokens, _deltas(tokens), "stop" if ended else "length", None)
    return _stopped(answer, rules)


def _tokens(prompt: Sequence[int], rules: AnswerRules, choice: int) -> list[int]:
    key = answer_key(rules.engine_seed, rules.request_seed, choice)
    pool = word_pool(rules.words)
    if rules.repeat_marker and rules.repeat_marker in decode(prompt):
        pool = pool[:1]
    if rules.json_object:
        tokens = write_json(answer_seed(prompt, key), pool)
        return tokens if rules.ignore_end else [*tokens, MESSAGE_END]
    start, seed = answer_start(prompt, key, pool)
    had = len(prompt) - start
    if rules.ignore_end:
        return write_tokens(seed, pool, had + rules.tokens_max)[had:]
    length = max(natural_length(seed), had + rules.tokens_min)
    return [*write_tokens(seed, pool, min(length, had + rules.tokens_max))[had:], MESSAGE_END]


def _deltas(tokens: Sequence[int]) -> list[str]:
    decoder = TextDecoder()
    deltas = ["" if token == MESSAGE_END else decoder.add(token) for token in tokens]
    deltas[-1] += decoder.end()
    return deltas


def _stopped(answer: Answer, rules: AnswerRules) -> Answer:
    """Cut an answer at its first stop token or stop string, none of which counts before ``tokens_min``.

    As vLLM, it sends the characters in which a stop string might begin only when it is clear that none does.
    """
    if not rules.stop and not rules.stop_token_ids:
        return answer
    text = ""
    held = 0 if rules.keep_stop else max((len(s) for s in rules.stop), default=1) - 1
    for i, (token, delta) in enumerate(zip(answer.tokens, answer.deltas, strict=True)):
        before = len(text)
        text += delta
        if i + 1 < rules.tokens_min:
            continue
        if token in rules.stop_token_ids:
            return _cut(answer, i + 1, len(text), held, token)
        found = [(at + len(s), s) for s in rules.stop if (at := text.find(s, max(0, before - len(s) + 1))) >= 0]
        if found:
            end, stop = min(found, key=lambda f: f[0])
            return _cut(answer, i + 1, end if rules.keep_stop else end - len(stop), held, stop)
    return replace(answer, deltas=_lagging(answer.deltas, len(text), held))


def _cut(answer: Answer, tokens: int, chars: int, held: int, reason: str | int) -> Answer:
    deltas = _lagging(answer.deltas[:tokens], chars, held)
    return Answer(answer.tokens[:tokens], deltas, "stop", reason)


def _lagging(deltas: Sequence[str], chars: int, held: int) -> list[str]:
    """The first ``chars`` characters of ``deltas``, each sent when ``held`` more are there, the last at the end."""
    text, out, sent, made = "".join(deltas), [], 0, 0
    for i, delta in enumerate(deltas):
        made += len(delta)
        end = max(sent, min(chars, made - held)) if i + 1 < len(deltas) else chars
        out.append(text[sent:end])
        sent = end
    return out
