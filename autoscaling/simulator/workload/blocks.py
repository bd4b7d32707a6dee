"""Chain hashes of prompts that have no text: a prompt is a row of labelled pieces, and equal rows have equal blocks.

Block ``i`` covers tokens ``i * block_tokens`` to ``(i + 1) * block_tokens``; only full blocks have a hash. It mixes the
hash of the block before with the label and position of each piece it touches, so that two prompts share their
first ``n`` hashes exactly when their first ``n`` blocks have the same pieces. The mixer is splitmix64 (Steele, Lea and
Flood 2014); it does not depend on ``PYTHONHASHSEED``.
"""

from __future__ import annotations

import hashlib

from policies.routing.rendezvous import GOLDEN, MASK, stir
from policies.types import BlockHash

_START: BlockHash = 0x243F6A8885A308D3
"""Hash before the first block: any number but 0."""


def mix(a: int, b: int) -> int:
    """64-bit hash of two 64-bit numbers."""
    return stir((a ^ (b * GOLDEN)) & MASK)


def label_of(*parts: object) -> int:
    """64-bit label of what ``parts`` name; the same parts always give the same label."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def chain(ids: list[int], full_blocks: int, salt: int) -> tuple[BlockHash, ...]:
    """Chain hashes of the first ``full_blocks`` of ``ids``, where a trace names its blocks by number."""
    hashes: list[BlockHash] = []
    last = salt
    for block_id in ids[:full_blocks]:
        last = mix(last, block_id)
        hashes.append(last)
    return tuple(hashes)


class PromptText:
    """A text that grows at its end, as the context of a conversation does."""

    __slots__ = ("_blocks", "_open", "block_tokens", "tokens")

    def __init__(self, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ValueError(f"block_tokens must be at least 1, is {block_tokens}")
        self.block_tokens = block_tokens
        self.tokens = 0
        self._blocks: list[BlockHash] = []
        self._open: BlockHash = _START
        """Hash of everything up to the end of the text; a block is closed where it ends on a boundary."""

    @property
    def blocks(self) -> tuple[BlockHash, ...]:
        """Chain hashes of the full blocks so far."""
        return tuple(self._blocks)

    def append(self, label: int, tokens: int) -> None:
        """Append ``tokens`` tokens of the piece ``label``. Use a label once per text, or its content repeats."""
        done = 0
        while done < tokens:
            room = self.block_tokens - self.tokens % self.block_tokens
            size = min(room, tokens - done)
            self._open = mix(mix(self._open, label), (done << 32) | size)
            done += size
            self.tokens += size
            if size == room:
                self._blocks.append(self._open)

    def cut(self, tokens: int) -> None:
        """Keep the first ``tokens`` tokens, down to a block's boundary: what follows will differ anyway."""
        full = min(tokens, self.tokens) // self.block_tokens
        del self._blocks[full:]
        self.tokens = full * self.block_tokens
        self._open = self._blocks[-1] if self._blocks else _START

    def copy(self) -> PromptText:
        """A text of its own with the same beginning."""
        other = PromptText(self.block_tokens)
        other.tokens, other._blocks, other._open = self.tokens, self._blocks.copy(), self._open
        return other
