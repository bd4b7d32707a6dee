from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.emulation.answers import AnswerRules, make_answer
from deployments.emulation.tokens import MESSAGE_END, encode, encode_chat

PROMPT = encode("Name a river.")


def test_natural_end_is_a_token_without_text() -> None:
    answer = make_answer(PROMPT, AnswerRules(tokens_max=1_000))
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert answer.tokens[-1] == MESSAGE_END
    assert answer.deltas[-1] == ""
    assert encode(answer.text) == answer.tokens[:-1]


@pytest.mark.parametrize("limit", [1, 2, 20])
def test_limit_ends_by_length(limit: int) -> None:
    answer = make_answer(PROMPT, AnswerRules(tokens_max=limit))
    assert (len(answer.tokens), answer.finish_reason) == (limit, "length")


def test_shorter_limit_gives_the_beginning_of_the_longer_answer() -> None:
    long = make_answer(PROMPT, AnswerRules(tokens_max=20))
    assert make_answer(PROMPT, AnswerRules(tokens_max=7)).tokens == long.tokens[:7]


def test_ignored_end_fills_the_limit() -> None:
    answer = make_answer(PROMPT, AnswerRules(tokens_max=900, ignore_end=True))
    assert (len(answer.tokens), answer.finish_reason) == (900, "length")


def test_minimum_makes_short_answers_longer() -> None:
    natural = make_answer(PROMPT, AnswerRules(tokens_max=1_000))
    answer = make_answer(PROMPT, AnswerRules(tokens_max=1_000, tokens_min=400))
    assert len(natural.tokens) < 400 < len(answer.tokens)
    assert answer.finish_reason == "stop"


@given(st.integers(0, 500), st.integers(1, 9), st.booleans())
def test_stop_string_ends_the_text_where_it_first_occurs(start: int, length: int, keep: bool) -> None:
    whole = make_answer(PROMPT, AnswerRules(tokens_max=1_000))
    stop = whole.text[start : start + length]
    if not stop:
        return
    at = whole.text.index(stop)
    answer = make_answer(PROMPT, AnswerRules(tokens_max=1_000, stop=("\x01", stop), keep_stop=keep))
    assert answer.text == whole.text[: at + (len(stop) if keep else 0)]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert len(answer.deltas) == len(answer.tokens)


def test_stop_string_does_not_count_before_the_minimum() -> None:
    whole = make_answer(PROMPT, AnswerRules(tokens_max=1_000))
    stop = whole.text[:3]
    answer = make_answer(PROMPT, AnswerRules(tokens_max=1_000, stop=(stop,), tokens_min=10))
    assert len(answer.tokens) >= 10


def test_stop_token_is_named_as_the_reason() -> None:
    whole = make_answer(PROMPT, AnswerRules(tokens_max=1_000))
    token = whole.tokens[5]
    answer = make_answer(PROMPT, AnswerRules(tokens_max=1_000, stop_token_ids=(token,)))
    assert answer.stop_reason == token
    assert len(answer.tokens) == whole.tokens.index(token) + 1


def test_json_answers_are_json() -> None:
    answer = make_answer(PROMPT, AnswerRules(tokens_max=1_000, json_object=True))
    assert list(json.loads(answer.text)) == ["text"]


def test_character_split_over_the_limit_becomes_the_replacement_character() -> None:
    answer = make_answer(PROMPT, AnswerRules(tokens_max=1, ignore_end=True, words="ä"))
    assert answer.text == "\ufffd"


WORDS = st.sampled_from(["lorem", "x", "ä ö über", "😀 ok", "a b"])
PROMPTS = st.sampled_from(
    ["Name a river.", "lorem ipsum dolor sit", "x x x", "a b a b a", "ä ö", "Say ü", " ".join(["ut et do"] * 20)]
)


@pytest.mark.slow
@given(PROMPTS, WORDS, st.integers(1, 60), st.booleans(), st.integers(0, 80), st.integers(0, 3), st.booleans())
def test_an_answer_goes_on_the_same_way_from_any_of_its_tokens(
    text: str, words: str, limit: int, endless: bool, least: int, seed: int, chat: bool
) -> None:
    prompt = encode_chat([("user", text)]) if chat else encode(text)
    rules = AnswerRules(limit, min(least, limit), words=words, engine_seed=seed, ignore_end=endless)
    whole = make_answer(prompt, rules).tokens
    for k in range(len(whole)):
        left = replace(rules, tokens_max=limit - k, tokens_min=max(0, rules.tokens_min - k))
        assert make_answer([*prompt, *whole[:k]], left).tokens == whole[k:]


@given(st.integers(0, 400), st.lists(st.integers(1, 9), min_size=1, max_size=3), st.booleans(), st.integers(0, 30))
def test_no_part_of_a_stop_string_is_sent_and_the_rest_is_not_held_back(
    start: int, lengths: list[int], keep: bool, least: int
) -> None:
    whole = make_answer(PROMPT, AnswerRules(tokens_max=1_000))
    stops = tuple(stop for n in lengths if (stop := whole.text[start : start + n])) or ("\x01",)
    rules = AnswerRules(tokens_max=1_000, stop=stops, keep_stop=keep, tokens_min=least)
    answer = make_answer(PROMPT, rules)
    held = 0 if keep else max(map(len, stops)) - 1
    made = sent = 0
    for delta, plain in zip(answer.deltas[:-1], whole.deltas, strict=False):
        made, sent = made + len(plain), sent + len(delta)
        assert sent == max(0, made - held)
    assert whole.text.startswith(answer.text)
    assert answer.text == whole.text or answer.stop_reason in stops
