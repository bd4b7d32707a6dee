"""Toy tokenizer and toy language model: reversible, deterministic, about four bytes a token.

Vocabulary::

    0..2                       <|endoftext|>, <|im_start|>, <|im_end|>
    3..258                     one byte each (so characters beyond ASCII are split, as byte-level tokenizers do)
    259..259 + 97**4 - 2       one to four characters of printable ASCII and newline, as digits of base 97

Text is cut from its start, so a longer prompt shares all tokens but perhaps the last with its own prefix. Every text
becomes bytes and back without loss; :class:`TextDecoder` holds back bytes that end in the middle of a character.

:func:`write_text` is the language model: words drawn by a generator seeded from the prompt's tokens. Equal prompts give
equal answers in every process, which is what lets tests compare replicas.
"""

from __future__ import annotations

import codecs
import json
import random
import re
from collections.abc import Sequence
from functools import lru_cache

import xxhash

END_OF_TEXT, MESSAGE_START, MESSAGE_END = 0, 1, 2
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_BYTE_0 = len(SPECIAL)
_CHUNK_0 = _BYTE_0 + 256
_CHARS = "\n" + "".join(chr(c) for c in range(32, 127))
_BASE = len(_CHARS) + 1
CHUNK_CHARS = 4
VOCABULARY = _CHUNK_0 + _BASE**CHUNK_CHARS - 1
"""Number of token ids; the first one that does not exist."""
_DIGIT = {char: i + 1 for i, char in enumerate(_CHARS)}
_PIECES = re.compile(r"[\n -~]{1,4}|[^\n -~]")
CHAT_TOKENS_MAX_CACHED = 4_096

LOREM = (
    "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt ut labore et dolore magna "
    "aliqua ut enim ad minim veniam quis nostrud exercitation ullamco laboris nisi ut aliquip ex ea commodo consequat"
)
ANSWER_TOKENS_MIN, ANSWER_TOKENS_MAX = 24, 200
"""An answer that nothing else ends has a length in this range, drawn with its text."""


@lru_cache(maxsize=CHAT_TOKENS_MAX_CACHED)
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


def prompt_seed(prompt: Sequence[int], engine_seed: int, request_seed: int | None, choice: int) -> int:
    """Seed of one answer: the prompt, the engine's seed, and where given the request's seed and choice index."""
    text = f"{engine_seed}/{request_seed}/{choice}/" + ",".join(map(str, prompt))
    return xxhash.xxh64_intdigest(text.encode())


def write_text(seed: int, words: str, tokens_max: int, ends: bool = True, json_object: bool = False) -> list[int]:
    """Tokens of the answer with this ``seed``: its natural length where it ``ends``, else ``tokens_max`` tokens.

    ``words`` are what it is made of, ``lorem`` stands for the usual words. ``json_object`` puts them into one object.
    """
    rng = random.Random(seed)
    pool = LOREM.split() if words == "lorem" else words.split() or [words]
    length = rng.randint(ANSWER_TOKENS_MIN, ANSWER_TOKENS_MAX)
    if not ends:
        length = tokens_max
    chars = length * CHUNK_CHARS
    parts: list[str] = []
    have = 0
    while have < chars:
        parts.append(rng.choice(pool))
        have += len(parts[-1].encode()) + 1
    text = " ".join(parts)
    if json_object:
        return encode(json.dumps({"text": text[: chars - 16].rstrip()}))
    ids = encode(text)
    return ids[:length] if len(ids) >= length else ids
