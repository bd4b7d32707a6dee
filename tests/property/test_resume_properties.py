"""A stream cut anywhere and resumed, as often as one likes, is byte for byte the stream that was never cut."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.resume import Journal
from tests.resume_streams import CHAT, COMPLETIONS, MODEL, asked_for_ids, planned, resumed, undisturbed

MESSAGES = [{"role": "user", "content": "Name a river."}]
USAGE = {"stream_options": {"include_usage": True}}
RUNNING = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
ACCENTS = 'ä öüß 😀é x" \\n'


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"model": MODEL, "messages": MESSAGES, "stream": True, "max_tokens": 7, "temperature": 0} | fields


def text(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"model": MODEL, "prompt": "Say", "stream": True, "max_tokens": 7, "temperature": 0} | fields


CASES: dict[str, tuple[tuple[str, dict[str, Any]], str]] = {
    "chat": (chat(), "lorem"),
    "chat with usage": (chat(**USAGE), "lorem"),
    "chat with running usage": (chat(**RUNNING), "lorem"),
    "chat, characters split over tokens": (chat(max_tokens=14, **USAGE), ACCENTS),
    "chat, as long as the context allows": (chat(max_tokens=None, stop_token_ids=[5]), "a b"),
    "chat to its natural end": (chat(max_completion_tokens=30, max_tokens=3, seed=5), "xyz uvw "),
    "chat, sampled": (chat(temperature=0.7, **USAGE), ACCENTS),
    "chat, ids for the client": (chat(return_token_ids=True, **RUNNING), ACCENTS),
    "chat, stop string": (chat(max_tokens=20, stop=["dolor sit", "ullamco"], **USAGE), "lorem"),
    "chat, stop string kept": (chat(max_tokens=20, stop="sit amet", include_stop_str_in_output=True), "sit amet"),
    "chat, stop strings that do not come": (chat(max_tokens=12, stop=["nothing of that", "é😀z"], **USAGE), ACCENTS),
    "chat, stop string after the least": (chat(max_tokens=20, min_tokens=9, stop=["a b"], ignore_eos=True), "a b"),
    "text": (text(), "lorem"),
    "text of ids": (text(prompt=[300, 301, 302], **USAGE), "lorem"),
    "text, sampled": (text(temperature=1.2, top_p=0.9, **RUNNING), ACCENTS),
    "text, ids for the client": (text(return_token_ids=True, **USAGE), "lorem"),
    "text, stop string": (text(max_tokens=20, stop=["é x"], **RUNNING), ACCENTS),
    "text, default length": (text(max_tokens=None), "lorem"),
}
NAMES = list(CASES)


def expected(path: str, fields: dict[str, Any], words: str, out: bytes) -> bytes:
    """The undisturbed stream; of the replica that began it in the client's eyes."""
    head = json.loads(out[6 : out.index(b"\n\n")])
    return undisturbed(path, fields, words, head["created"] - 1_000)


def without_details(stream: bytes) -> list[Any]:
    """Events of a stream without what only the engine that ended it knows."""
    found = [json.loads(event[6:]) for event in stream.split(b"\n\n") if event[6:] and event != b"data: [DONE]"]
    if found[-1].get("usage"):
        found[-1].pop("system_fingerprint", None)
        found[-1]["usage"].pop("prompt_tokens_details", None)
    return found


def check(path: str, fields: dict[str, Any], words: str, out: bytes, journal: Journal) -> None:
    whole = expected(path, fields, words, out)
    if journal.closed_here:
        assert without_details(out) == without_details(whole)
        assert out.endswith(b"data: [DONE]\n\n")
        assert out.count(b"[DONE]") == 1
    else:
        assert out == whole


@pytest.mark.parametrize("name", NAMES)
def test_a_stream_cut_at_any_byte_and_resumed_is_the_one_that_was_never_cut(name: str) -> None:
    (path, fields), words = CASES[name]
    for cut in range(len(asked_for_ids(path, fields, words)) + 1):
        out, journal = resumed(path, fields, [cut], words)
        check(path, fields, words, out, journal)


@given(
    st.sampled_from(NAMES),
    st.lists(st.integers(0, 6_000), max_size=6),
    st.lists(st.integers(0, 1_000_000), max_size=12),
)
@settings(max_examples=400, deadline=None)
def test_so_is_one_cut_several_times_however_its_bytes_arrive(name: str, cuts: list[int], reads: list[int]) -> None:
    (path, fields), words = CASES[name]
    out, journal = resumed(path, fields, cuts, words, reads)
    check(path, fields, words, out, journal)


@given(st.sampled_from(NAMES), st.integers(0, 6_000), st.lists(st.integers(0, 1_000_000), max_size=12))
@settings(max_examples=200, deadline=None)
def test_a_client_gets_whole_events_only(name: str, cut: int, reads: list[int]) -> None:
    (path, fields), words = CASES[name]
    journal = Journal(planned(path, fields))
    data = asked_for_ids(path, fields, words)[:cut]
    out = b"".join([journal.take(data[a:b]) for a, b in _spans(len(data), reads)])
    assert out == b"" or out.endswith(b"\n\n")
    assert undisturbed(path, fields, words).startswith(out)
    assert out.count(b"\n\n") == data.count(b"\n\n")


@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_counted_as_the_engine_counts_them(name: str) -> None:
    (path, fields), words = CASES[name]
    journal = Journal(planned(path, fields))
    journal.take(asked_for_ids(path, fields, words))
    options = {"stream_options": {"include_usage": True}}
    usage = json.loads(undisturbed(path, fields | options, words).split(b"\n\n")[-3][6:])["usage"]
    assert (journal.prompt_tokens, journal.output_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])


def _spans(length: int, reads: list[int]) -> list[tuple[int, int]]:
    at = sorted({0, length, *(read % (length + 1) for read in reads)})
    return list(itertools.pairwise(at))
