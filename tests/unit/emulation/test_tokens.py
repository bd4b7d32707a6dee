from __future__ import annotations

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
    decode,
    encode,
    encode_chat,
    prompt_seed,
    token_bytes,
    write_text,
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
    assert prompt_seed(prompt, 0, None, choice) == prompt_seed(list(prompt), 0, None, choice)
    assert prompt_seed(prompt, 0, None, choice) != prompt_seed(prompt, 0, None, choice + 1)
    assert prompt_seed(prompt, 0, None, choice) != prompt_seed(prompt, 1, None, choice)
    assert prompt_seed(prompt, 0, 5, choice) != prompt_seed(prompt, 0, 6, choice)


@given(st.integers(0, 2**32))
def test_natural_answers_have_a_length_within_bounds(seed: int) -> None:
    assert ANSWER_TOKENS_MIN <= len(write_text(seed, "lorem", 1)) <= ANSWER_TOKENS_MAX


def test_endless_answers_have_the_length_asked_for_in_any_alphabet() -> None:
    for words in ("lorem", "x", "ä ö ü", "😀"):
        assert len(write_text(1, words, 77, ends=False)) == 77
