"""Toy tokenizer and toy language model: reversible, deterministic, about four bytes a token.

Vocabulary::

    0..2                       <|endoftext|>, <|im_start|>, <|im_end|>
    3..258                     one byte each (so characters beyond ASCII are split, as byte-level tokenizers do)
    259..259 + 97**4 - 2       one to four characters of printable ASCII and newline, as digits of base 97

Text is cut from its start, so a longer prompt shares all tokens but perhaps the last with its own prefix. Every text
becomes bytes and back without loss; :class:`TextDecoder` holds back bytes that end in the middle of a character.

The language model writes words drawn by a generator. Its seed is a hash of the tokens before the answer, so equal
prompts give equal answers in every process, which is what lets tests compare replicas. And it is autoregressive, as a
real one:

    answer(prompt + answer(prompt)[:k]) == answer(prompt)[k:]

:func:`answer_start` finds where in a prompt an answer began: at the first place whose answer begins with all that
follows it. Adding tokens of that answer does not move the place, and removing some does not make an earlier one fit.
"""

from __future__ import annotations

import codecs
import json
import random
import re
from array import array
from collections.abc import Sequence
from functools import lru_cache

import xxhash

END_OF_TEXT, MESSAGE_START, MESSAGE_END = 0, 1, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_ID_BYTES = 4
_BYTE_0 = len(SPECIAL)
_CHUNK_0 = _BYTE_0 + 256
_CHARS = "\n" + "".join(chr(c) for c in range(32, 127))
_BASE = len(_CHARS) + 1
CHUNK_CHARS = 4
VOCABULARY = _CHUNK_0 + _BASE**CHUNK_CHARS - 1
"""Number of token ids; the first one that does not exist."""
_DIGIT = {char: i + 1 for i, char in enumerate(_CHARS)}
_PIECES = re.compile(r"[\n -~]{1,4}|[^\n -~]")
TOKENS_MAX_CACHED = 16_384

LOREM = (
    "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt ut labore et dolore magna "
    "aliqua ut enim ad minim veniam quis nostrud exercitation ullamco laboris nisi ut aliquip ex ea commodo consequat"
)
ANSWER_TOKENS_MIN, ANSWER_TOKENS_MAX = 24, 200
"""An answer that nothing else ends has a length in this range, drawn with its text."""


@lru_cache(maxsize=TOKENS_MAX_CACHED)
def _chunk_id(chunk: str) -> int:
    number = 0
    for char in chunk:
        number = number * _BASE + _DIGIT[char]
    return _CHUNK_0 + number - 1


def encode(text: str) -> list[int]:
    """Token ids of ``text``. ``UnicodeEncodeError`` for a lone surrogate."""
    ids: list[int] = []
    for piece in _PIECES.findall(text):
        if piece[0] in _DIGIT:
            ids.append(_chunk_id(piece))
        else:
            ids.extend(_BYTE_0 + byte for byte in piece.encode())
    return ids


@lru_cache(maxsize=TOKENS_MAX_CACHED)
def token_bytes(token: int) -> bytes:
    """Bytes of one token; special tokens give their name, ids beyond the vocabulary nothing."""
    if token < _BYTE_0:
        return SPECIAL[token].encode() if token >= 0 else b""
    if token < _CHUNK_0:
        return bytes((token - _BYTE_0,))
    if token >= VOCABULARY:
        return b""
    number, chars = token - _CHUNK_0 + 1, ""
    while number:
        number, digit = divmod(number, _BASE)
        chars = (_CHARS[digit - 1] if digit else "") + chars
    return chars.encode()


def decode(ids: Sequence[int]) -> str:
    """Text of ``ids``; bytes that are no UTF-8 become U+FFFD."""
    return b"".join(map(token_bytes, ids)).decode("utf-8", "replace")


def token_text(token: int) -> str:
    """One token as text of its own, for log probabilities and token strings."""
    return token_bytes(token).decode("utf-8", "replace")


class TextDecoder:
    """Turns tokens into text one by one; a character split over tokens appears with its last byte."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        """Text that became complete; empty while a character is open."""
        return self._decoder.decode(token_bytes(token))

    def end(self) -> str:
        """What is left at the end of the stream."""
        return self._decoder.decode(b"", final=True)


def encode_chat(messages: Sequence[tuple[str, str]], generation_prompt: bool = True) -> list[int]:
    """Token ids of a conversation of (role, text), every message between special tokens.

    An answer sent back as a message has the tokens it was made of, so the next turn finds it in the prefix cache.
    """
    ids: list[int] = []
    for role, text in messages:
        ids += [MESSAGE_START, *encode(f"{role}\n"), *encode(text), MESSAGE_END, *encode("\n")]
    if generation_prompt:
        ids += [MESSAGE_START, *encode("assistant\n")]
    return ids


def word_pool(words: str) -> list[str]:
    """Words of a text; ``lorem`` stands for the usual ones."""
    return LOREM.split() if words == "lorem" else words.split() or [words]


def answer_key(engine_seed: int, request_seed: int | None, choice: int) -> int:
    """What beside the prompt makes an answer: the engine's seed, where given the request's, the choice's index."""
    return xxhash.xxh64_intdigest(f"{engine_seed}/{request_seed}/{choice}".encode())


def answer_seed(tokens: Sequence[int], key: int) -> int:
    """Seed of the answer that begins after ``tokens``."""
    return xxhash.xxh64_intdigest(array("I", tokens).tobytes(), key)


def answer_start(prompt: Sequence[int], key: int, pool: list[str]) -> tuple[int, int]:
    """Where in ``prompt`` an answer began, and its seed; at the prompt's end unless that is the start of an answer."""
    alphabet = frozenset(" ".join(["", *pool]).encode())
    at = len(prompt)
    while at and prompt[at - 1] >= _BYTE_0 and alphabet.issuperset(token_bytes(prompt[at - 1])):
        at -= 1
    raw = memoryview(array("I", prompt).tobytes())
    hasher = xxhash.xxh64(raw[: at * _ID_BYTES], key)
    tail = b"".join(map(token_bytes, prompt[at:]))
    encoded = [word.encode() for word in pool]
    skipped = 0
    for place in range(at, len(prompt)):
        seed = hasher.intdigest()
        first = encoded[seed % len(encoded)]
        shown = tail[skipped : skipped + len(first)]
        if first.startswith(shown) and _is_stream(prompt[place:], seed, pool):
            return place, seed
        hasher.update(raw[place * _ID_BYTES : (place + 1) * _ID_BYTES])
        skipped += len(token_bytes(prompt[place]))
    return len(prompt), hasher.intdigest()


def _is_stream(tokens: Sequence[int], seed: int, pool: list[str]) -> bool:
    few = 4  # most places differ at once
    return list(tokens[:few]) == write_tokens(seed, pool, min(few, len(tokens))) and (
        list(tokens) == write_tokens(seed, pool, len(tokens))
    )


def natural_length(seed: int) -> int:
    """Tokens of the answer with this ``seed`` when nothing else ends it."""
    return ANSWER_TOKENS_MIN + seed // 7 % (ANSWER_TOKENS_MAX - ANSWER_TOKENS_MIN + 1)


def write_tokens(seed: int, pool: list[str], count: int) -> list[int]:
    """The first ``count`` tokens of the endless answer with this ``seed``."""
    return encode(_write(seed, pool, count * CHUNK_CHARS + 1))[:count]


def write_json(seed: int, pool: list[str]) -> list[int]:
    """An answer that is one JSON object."""
    chars = natural_length(seed) * CHUNK_CHARS
    text = _write(seed, pool, chars)[: chars - 16]
    return encode(json.dumps({"text": text.rstrip()}))


def _write(seed: int, pool: list[str], bytes_min: int) -> str:
    """Words, at least ``bytes_min`` bytes of them; the first is the seed's, the rest a generator's."""
    rng = random.Random(seed)
    parts = [pool[seed % len(pool)]]
    have = len(parts[0].encode())
    while have < bytes_min:
        parts.append(rng.choice(pool))
        have += len(parts[-1].encode()) + 1
    return " ".join(parts)
