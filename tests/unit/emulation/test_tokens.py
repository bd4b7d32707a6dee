from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.emulation.answers import AnswerRules, make_answer
from deployments.emulation.tokens import (
    ANSWER_TOKENS_MAX,
    ANSWER_TOKENS_MIN,
    LOREM,
    MESSAGE_END,
    MESSAGE_START,
    SPECIAL,
    VOCABULARY,
    TextDecoder,
    answer_key,
    answer_seed,
    answer_start,
    decode,
    encode,
    encode_chat,
    natural_length,
    token_bytes,
    word_pool,
    write_json,
    write_tokens,
)

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)


@given(TEXT)
def test_text_survives_encoding(text: str) -> None:
    ids = encode(text)
    assert decode(ids) == text
    assert all(0 <= token < VOCABULARY for token in ids)


@given(TEXT)
def test_decoding_token_by_token_gives_the_same_text(text: str) -> None:
    decoder = TextDecoder()
    assert "".join(map(decoder.add, encode(text))) + decoder.end() == text


@given(TEXT, TEXT)
def test_longer_text_shares_all_tokens_but_the_last_with_its_beginning(text: str, more: str) -> None:
    short, long = encode(text), encode(text + more)
    assert long[: max(0, len(short) - 1)] == short[:-1]


def test_about_four_bytes_a_token() -> None:
    assert 3.9 <= len(LOREM.encode()) / len(encode(LOREM)) <= 4.1


def test_every_id_has_bytes_and_none_beyond_the_vocabulary() -> None:
    assert token_bytes(0) == SPECIAL[0].encode()
    assert token_bytes(3) == b"\x00"
    assert token_bytes(258) == b"\xff"
    assert token_bytes(259) == b"\n"
    assert token_bytes(VOCABULARY - 1) == b"~~~~"
    assert token_bytes(VOCABULARY) == b""
    assert token_bytes(-1) == b""


def test_characters_beyond_ascii_are_split_over_tokens() -> None:
    assert len(encode("é")) == 2
    assert len(encode("\U0001f600")) == 4


def test_bytes_that_are_no_character_become_the_replacement_character() -> None:
    assert decode([3 + 0xC3]) == "\ufffd"
    decoder = TextDecoder()
    assert decoder.add(3 + 0xC3) == ""
    assert decoder.end() == "\ufffd"


def test_next_turn_begins_with_the_tokens_of_the_last_one_and_its_answer() -> None:
    prompt = encode_chat([("user", "Name a river.")])
    answer = make_answer(prompt, AnswerRules(tokens_max=30))
    nxt = encode_chat([("user", "Name a river."), ("assistant", answer.text), ("user", "Another.")])
    body = [token for token in answer.tokens if token != MESSAGE_END]
    assert nxt[: len(prompt) + len(body)] == prompt + body


def test_chat_without_generation_prompt_ends_with_the_last_message() -> None:
    assert encode_chat([("user", "a")], generation_prompt=False).count(MESSAGE_START) == 1
    assert encode_chat([]) == [MESSAGE_START, *encode("assistant\n")]


@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=30), st.integers(0, 9))
def test_equal_prompts_have_equal_seeds_and_other_choices_another(prompt: list[int], choice: int) -> None:
    key = answer_key(0, None, choice)
    assert answer_seed(prompt, key) == answer_seed(tuple(prompt), answer_key(0, None, choice))
    others = {key, answer_key(0, None, choice + 1), answer_key(1, None, choice), answer_key(0, 5, choice)}
    assert len(others) == len({answer_seed(prompt, other) for other in others}) == 4


@given(st.integers(0, 2**64 - 1))
def test_natural_answers_have_a_length_within_bounds(seed: int) -> None:
    assert ANSWER_TOKENS_MIN <= natural_length(seed) <= ANSWER_TOKENS_MAX
    assert len(write_json(seed, word_pool("lorem"))) <= ANSWER_TOKENS_MAX


@pytest.mark.parametrize("words", ["lorem", "x", "ä ö ü", "😀", "a bb ccc dddd"])
def test_a_shorter_text_is_the_beginning_of_a_longer_one_in_any_alphabet(words: str) -> None:
    whole = write_tokens(1, word_pool(words), 90)
    for count in range(91):
        assert write_tokens(1, word_pool(words), count) == whole[:count]


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=30))
def test_a_prompt_that_no_answer_made_has_its_answer_begin_at_its_end(prompt: list[int]) -> None:
    key = answer_key(0, None, 0)
    assert answer_start(prompt, key, word_pool("lorem")) == (len(prompt), answer_seed(prompt, key))


def test_words_of_the_answers_alphabet_are_not_taken_for_an_answer() -> None:
    prompt, key = encode(f"{LOREM} {LOREM}"), answer_key(0, None, 0)
    start, _seed = answer_start(prompt, key, word_pool("lorem"))
    assert start >= len(prompt) - 2  # two tokens may fit by chance
