"""Streams of the emulated engine as bytes, without HTTP and without waiting, and streams that are cut and resumed.

An engine here is what answers: the emulated engine's own code from body to events. Each replica has another creation
time, as replicas have that are asked one after the other.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from deployments.emulation import chat, completions
from deployments.emulation.jobs import View
from deployments.endpoints import RELAYED
from deployments.resume import Journal, ResumePlan, plan_of, splice
from deployments.settings import EmulatedSettings

MODEL = "m"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CREATED_S = 1_000
CONTEXT_TOKENS_MAX = 48
WORDS = "lorem"


@lru_cache(maxsize=4_096)
def stream(path: str, body: bytes, words: str = WORDS, replica: int = 0) -> bytes:
    """The stream that ``body`` asks for, of an engine whose answers are made of ``words``."""
    engine = EmulatedSettings(context_tokens_max=CONTEXT_TOKENS_MAX, text=words)
    parse = chat.parse if path == CHAT else completions.parse
    view: View = parse(json.loads(body), MODEL, engine, "r1", CREATED_S + replica)
    answer = view.job.answers[0]
    count = len(answer.tokens)
    tokens = [view.token(0, i, i == count) for i in range(1, count + 1)]
    return b"".join([*view.opening(), *view.first(), *tokens, *view.closing(0)])


def planned(path: str, fields: dict[str, Any]) -> ResumePlan:
    """The plan of a request that can be resumed."""
    plan = plan_of(fields, RELAYED[path])
    assert isinstance(plan, ResumePlan), plan
    return plan


def pieces(data: bytes, cuts: Iterable[int]) -> list[bytes]:
    """``data`` cut at ``cuts``, as a socket may hand it over."""
    at = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[a:b] for a, b in itertools.pairwise(at)]


def resumed(
    path: str,
    fields: dict[str, Any],
    cuts: Sequence[int],
    words: str = WORDS,
    reads: Sequence[int] = (),
) -> tuple[bytes, Journal]:
    """What a client gets whose stream is cut after ``cuts[0]`` bytes, then its resumption after ``cuts[1]``, and so on.

    The bytes of each part come in pieces that end at ``reads``.
    """
    journal = Journal(planned(path, fields))
    body = splice(json.dumps(fields).encode(), {"return_token_ids": True})
    take, out, asked = journal.take, b"", (path, body)
    for replica, cut in enumerate([*cuts, -1]):
        data = stream(*asked, words, replica)
        part = data[:cut] if 0 <= cut < len(data) else data
        out += b"".join([take(piece) for piece in pieces(part, reads)])
        if len(part) == len(data):
            assert not journal.flush()
            return out, journal
        if journal.finished:
            return out + journal.closing(), journal
        again = journal.continuation(fields, CONTEXT_TOKENS_MAX)
        assert again is not None, journal.reason
        asked, take = again, journal.take_resumed
    raise AssertionError("the last part is never cut")


def undisturbed(path: str, fields: dict[str, Any], words: str = WORDS, replica: int = 0) -> bytes:
    """What the client gets from an engine that nobody asked for token ids."""
    return stream(path, json.dumps(fields).encode(), words, replica)


def asked_for_ids(path: str, fields: dict[str, Any], words: str = WORDS) -> bytes:
    """What the gateway gets from the first engine."""
    return stream(path, splice(json.dumps(fields).encode(), {"return_token_ids": True}), words)
