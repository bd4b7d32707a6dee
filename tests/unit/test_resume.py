from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from deployments import resume
from deployments.resume import Journal, ResumeMismatchError
from deployments.resume_plan import ResumePlan
from tests.resume_streams import CHAT, COMPLETIONS, MODEL, planned

HEAD = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":7,"model":"m","choices":['
ROLE = (
    HEAD + b'{"index":0,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],'
    b'"prompt_token_ids":[5,6],"prompt_text":null}\n\n'
)
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"engine died","type":"InternalServerError","param":null,"code":500}}\n\n'
GREEDY: dict[str, Any] = {
    "model": MODEL, "messages": [{"role": "user", "content": "a"}], "stream": True, "temperature": 0, "max_tokens": 40,
}  # fmt: skip
SAMPLED = GREEDY | {"temperature": 1}


def token(text: str, *ids: int, finish: str | None = None, stop: object = None) -> bytes:
    """One event of a chat stream, as vLLM writes it."""
    end = b',"stop_reason":' + msgspec.json.encode(stop) if finish else b""
    return (
        HEAD + b'{"index":0,"delta":{"content":' + msgspec.json.encode(text) + b'},"logprobs":null,"finish_reason":'
        + msgspec.json.encode(finish) + end + b',"token_ids":' + msgspec.json.encode(ids) + b"}]}\n\n"
    )  # fmt: skip


def rest(text: str, *ids: int, finish: str | None = None, stop: object = None) -> bytes:
    """One event of a continuation."""
    return (
        b'data: {"id":"cmpl-2","object":"text_completion","created":9,"model":"m","choices":[{"index":0,"text":'
        + msgspec.json.encode(text) + b',"logprobs":null,"finish_reason":' + msgspec.json.encode(finish)
        + b',"stop_reason":' + msgspec.json.encode(stop) + b',"prompt_token_ids":null,"token_ids":'
        + msgspec.json.encode(ids) + b"}]}\n\n"
    )  # fmt: skip


def without_ids(event: bytes) -> bytes:
    """The event as an engine sends it that nobody asked for ids."""
    value = json.loads(event[6:])
    for name in ("prompt_token_ids", "token_ids"):
        for part in (value, *value["choices"]):
            if name in part:
                part[name] = None
    return b"data: " + msgspec.json.encode(value) + b"\n\n"


def journal_after(fields: dict[str, Any], *events: bytes, path: str = CHAT) -> Journal:
    journal = Journal(planned(path, fields))
    for event in events:
        journal.take(event)
    return journal


def continued(journal: Journal, fields: dict[str, Any]) -> dict[str, Any]:
    """The body of the continuation."""
    again = journal.continuation(fields, 100)
    assert again is not None, journal.reason
    assert again[0] == COMPLETIONS
    body: dict[str, Any] = json.loads(again[1])
    return body


# --- what the client gets ---------------------------------------------------------------------------------------------


def test_ids_are_taken_out_and_everything_else_stays() -> None:
    journal = Journal(planned(CHAT, GREEDY))
    events = [ROLE, token('a "]} \\n', 7), token("", 8), token("b", 9, 10), token("c", 11, finish="stop", stop="x")]
    assert [journal.take(event) for event in events] == [without_ids(event) for event in events]
    assert journal.take(DONE) == DONE


def test_text_that_looks_like_ids_is_text() -> None:
    text = '"token_ids":[1,2] "},"logprobs":null,"finish_reason":null,"token_ids":[3]'
    journal = journal_after(GREEDY, ROLE)
    assert journal.take(token(text, 7)) == without_ids(token(text, 7))
    assert continued(journal, GREEDY)["prompt"] == [5, 6, 7]


def test_the_beginning_of_an_event_waits_for_its_rest() -> None:
    journal = journal_after(GREEDY, ROLE)
    event = token("a", 7)
    assert journal.take(event[:50]) == b""
    assert journal.take(event[50:] + event[:9]) == without_ids(event)
    assert journal.flush() == event[:9]
    assert journal.flush() == b""


def test_an_engines_error_is_kept_and_not_passed_on() -> None:
    journal = journal_after(GREEDY, ROLE, token("a", 7))
    assert journal.take(ERROR + DONE) == b""
    assert journal.error == ERROR
    assert not journal.finished
    assert continued(journal, GREEDY)["prompt"] == [5, 6, 7]
    assert journal.error is None


def test_an_answer_the_engine_gave_up_is_not_taken_for_complete() -> None:
    journal = journal_after(GREEDY, ROLE, token("a", 7))
    assert journal.take(token("", finish="abort")) == b""
    assert journal.error is not None
    assert not journal.finished
    continued(journal, GREEDY)
    assert journal.take_resumed(rest("", finish="abort")) == b""
    assert journal.error is not None


def test_text_about_errors_is_text() -> None:
    journal = journal_after(GREEDY, ROLE)
    event = token('{"error":{"message":"x"}}', 7)
    assert journal.take(event) == without_ids(event)
    assert journal.error is None


# --- where it goes on -------------------------------------------------------------------------------------------------


def test_it_goes_on_after_the_last_token() -> None:
    body = continued(journal_after(GREEDY, ROLE, token("a", 7), token("b", 8)), GREEDY)
    assert body == {
        "model": MODEL, "temperature": 0, "stream": True, "return_token_ids": True, "max_tokens": 38, "min_tokens": 0,
        "prompt": [5, 6, 7, 8],
    }  # fmt: skip


def test_it_goes_on_before_tokens_that_have_no_text_yet_and_shows_nothing_twice() -> None:
    journal = journal_after(GREEDY, ROLE, token("a", 7), token("", 8), token("", 9))
    assert continued(journal, GREEDY)["prompt"] == [5, 6, 7]
    assert journal.take_resumed(rest("", 8) + rest("", 9)) == b""
    assert journal.take_resumed(rest("é", 10)) == without_ids(token("é", 10))
    assert continued(journal, GREEDY)["prompt"] == [5, 6, 7, 8, 9, 10]


def test_after_several_tokens_at_once_it_goes_on_from_before_them_and_drops_their_text() -> None:
    journal = journal_after(GREEDY, ROLE, token("a", 7), token("xyz", 8, 9), token("u", 10, 11))
    assert continued(journal, GREEDY)["prompt"] == [5, 6, 7]
    assert journal.take_resumed(rest("x", 8)) == b""
    assert journal.take_resumed(rest('yzuv"', 9, 10, 11, 12)) == without_ids(token('v"', 12))
    assert journal.take_resumed(rest("w", 13)) == without_ids(token("w", 13))


def test_a_sampled_stream_goes_on_only_where_no_text_is_open() -> None:
    journal = journal_after(SAMPLED, ROLE, token("a", 7), token("", 8))
    assert continued(journal, SAMPLED)["prompt"] == [5, 6, 7]
    assert journal.take_resumed(rest("", 80)) == b""
    assert journal.take_resumed(rest("b", 81)) == without_ids(token("b", 81))
    journal = journal_after(SAMPLED, ROLE, token("a", 7), token("bc", 8, 9))
    assert not journal.resumable
    assert journal.continuation(SAMPLED, 100) is None
    journal.take(token("d", 10))
    assert journal.resumable


def test_a_sampled_stream_whose_client_has_ids_goes_on_only_after_all_of_them() -> None:
    fields = SAMPLED | {"return_token_ids": True}
    journal = journal_after(fields, ROLE, token("a", 7), token("", 8))
    assert not journal.resumable
    journal.take(token("b", 9))
    assert journal.resumable


def test_with_stop_strings_it_goes_on_early_enough_to_find_one_that_had_begun() -> None:
    fields = GREEDY | {"stop": ["01234"]}
    # The engine holds four characters back; each token has two. "ab" and "cd" are sent two tokens after they were made.
    journal = journal_after(fields, ROLE, token("", 1), token("", 2), token("ab", 3), token("cd", 4))
    # Four characters are sent, and where the tokens that made them end is not known: a stop string may begin in "0123".
    assert continued(journal, fields)["prompt"] == [5, 6]
    assert journal.take_resumed(rest("", 1) + rest("", 2) + rest("ab", 3) + rest("cd", 4)) == b""
    assert journal.take_resumed(rest("ef", 5)) == without_ids(token("ef", 5))
    # Six are sent, which are those of the first three tokens.
    assert continued(journal, fields)["prompt"] == [5, 6, 1, 2, 3]
    assert journal.take_resumed(rest("", 4) + rest("", 5)) == b""
    assert journal.take_resumed(rest("gh", 6)) == without_ids(token("gh", 6))


def test_when_the_answer_was_cut_before_its_first_event_the_request_is_asked_again() -> None:
    journal = journal_after(GREEDY, ROLE[:40])
    again = journal.continuation(GREEDY, None)
    assert again is not None
    assert again[0] == CHAT
    assert json.loads(again[1]) == GREEDY | {"return_token_ids": True}
    assert journal.take_resumed(ROLE) == without_ids(ROLE)


@pytest.mark.parametrize(("context", "left"), [(100, 97), (4, 1), (3, None), (None, None)])
def test_a_request_without_a_length_has_what_the_context_leaves(context: int | None, left: int | None) -> None:
    fields = {k: v for k, v in GREEDY.items() if k != "max_tokens"}
    journal = journal_after(fields, ROLE, token("a", 7))
    again = journal.continuation(fields, context)
    assert (json.loads(again[1])["max_tokens"] if again else None) == left


# --- exact or not at all ----------------------------------------------------------------------------------------------

BEGUN = (ROLE, token("a", 7), token("bc", 8, 9))


@pytest.mark.parametrize(
    "event",
    [
        rest("x", 80),
        rest("bcd", 8, 9),
        rest("b", 8, 9, 10),
        rest("b", 8, finish="stop"),
        b'data: {"id":"cmpl-2","object":"text_completion"}\n\n',
        token("b", 8),
        b'data: {"choices":[],"usage":null}\n\n',
        b": ping\n\n",
    ],
)
def test_a_continuation_that_does_not_fit_is_an_error(event: bytes) -> None:
    journal = journal_after(GREEDY, *BEGUN)
    continued(journal, GREEDY)
    with pytest.raises(ResumeMismatchError):
        journal.take_resumed(event)


def test_what_fits_of_a_chunk_is_passed_on_before_what_does_not() -> None:
    journal = journal_after(GREEDY, ROLE, token("a", 7))
    continued(journal, GREEDY)
    assert journal.take_resumed(rest("b", 8) + b": ping\n\n" + rest("c", 9)) == without_ids(token("b", 8))
    assert journal.error is not None


def test_with_stop_strings_a_difference_leaves_one_more_way_which_is_the_whole_answer_again() -> None:
    fields = GREEDY | {"stop": ["012"]}
    events = [token("", 1), token("abc", 2), token("def", 3)]  # of 2, 3 and 3 characters, two of which are held back
    journal = journal_after(fields, ROLE, *events)
    assert continued(journal, fields)["prompt"] == [5, 6, 1, 2]
    with pytest.raises(ResumeMismatchError):
        journal.take_resumed(rest("f", 30))
    assert journal.resumable
    assert continued(journal, fields)["prompt"] == [5, 6]
    assert journal.take_resumed(rest("", 1) + rest("abc", 2) + rest("def", 3)) == b""
    assert journal.take_resumed(rest("gh", 4)) == without_ids(token("gh", 4))
    continued(journal, fields)
    with pytest.raises(ResumeMismatchError):
        journal.take_resumed(rest("", 10))
    assert not journal.resumable


def test_tokens_of_which_the_client_has_no_text_may_be_others() -> None:
    journal = journal_after(GREEDY, ROLE, token("a", 7), token("", 8))
    continued(journal, GREEDY)
    assert journal.take_resumed(rest("", 80)) == b""
    assert journal.take_resumed(rest("ä", 81)) == without_ids(token("ä", 81))
    assert continued(journal, GREEDY)["prompt"] == [5, 6, 7, 80, 81]


@pytest.mark.parametrize(
    "event",
    [
        HEAD + b'{"index":0,"delta":{"reasoning":"x"},"logprobs":null,"finish_reason":null,"token_ids":[7]}]}\n\n',
        HEAD + b'{"index":0,"delta":{"content":"x","tool_calls":[]},"logprobs":null,"finish_reason":null,'
        b'"token_ids":[7]}]}\n\n',
        HEAD + b'{"index":1,"delta":{"content":"x"},"logprobs":null,"finish_reason":null,"token_ids":[7]}]}\n\n',
        HEAD + b'{"index":0,"delta":{"content":"x"},"logprobs":{},"finish_reason":null,"token_ids":[7]}]}\n\n',
        HEAD + b'{"index":0,"delta":{"content":"x"},"logprobs":null,"finish_reason":null,"token_ids":null}]}\n\n',
        b": ping\n\n",
        b'data: {"id": "broken", "choices": [{\n\n',
    ],
)
def test_an_event_of_unknown_form_is_passed_on_and_ends_what_can_be_promised(event: bytes) -> None:
    journal = journal_after(GREEDY, ROLE, token("a", 7))
    assert journal.take(event) == event
    journal.take(token("b", 8))
    assert not journal.resumable
    assert journal.continuation(GREEDY, 100) is None


def test_a_stream_without_ids_cannot_be_resumed() -> None:
    journal = Journal(planned(CHAT, GREEDY))
    role = without_ids(ROLE)
    assert journal.take(role) == role
    assert not journal.resumable


def test_a_complete_answer_needs_no_continuation_and_is_closed_here() -> None:
    fields = GREEDY | {"stream_options": {"include_usage": True}}
    journal = journal_after(fields, ROLE, token("a", 7, finish="length"))
    assert journal.finished
    assert journal.continuation(fields, 100) is None
    usage = HEAD + b'],"usage":{"prompt_tokens":2,"total_tokens":3,"completion_tokens":1}}\n\n'
    assert journal.closing() == usage + DONE
    assert journal.closing() == b""
    journal = journal_after(fields, ROLE, token("a", 7, finish="length"), usage)
    assert journal.closing() == DONE
    journal = journal_after(GREEDY, ROLE, token("a", 7, finish="length"), DONE)
    assert journal.closing() == b""


# --- bounds -----------------------------------------------------------------------------------------------------------


def test_a_journal_does_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "JOURNAL_BYTES_MAX", 1_000)
    journal = journal_after(GREEDY, ROLE)
    event = token("a", 123_456)
    for _ in range(400):
        assert journal.take(event) == without_ids(event)
    assert not journal.resumable
    assert len(journal._tokens) <= 1_010


def test_an_event_without_an_end_is_passed_on_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "JOURNAL_BYTES_MAX", 1_000)
    journal = journal_after(GREEDY, ROLE)
    out = b"".join([journal.take(b"x" * 100) for _ in range(11)])
    assert out == b"x" * 1_100
    assert not journal.resumable


def test_resume_points_kept_for_stop_strings_are_as_many_as_their_characters() -> None:
    plan = ResumePlan(
        chat=True, greedy=True, stop_chars=9, held_chars=9, tokens_max=None, tokens_min=0, ids_asked=False, usage=False
    )
    journal = Journal(plan)
    journal.take(ROLE)
    for n in range(500):
        journal.take(token("ä", n))
    assert len(journal._marks) <= 11


def test_a_continuation_may_be_asked_for_again_when_nobody_took_it() -> None:
    for fields in (GREEDY, SAMPLED):
        journal = journal_after(fields, ROLE, token("a", 7), token("", 8), token("", 9))
        bodies = [continued(journal, fields) for _ in range(3)]
        assert bodies == [bodies[0]] * 3
        assert journal.take_resumed(rest("", 8) + rest("", 9)) == b""
        assert journal.take_resumed(rest("é", 10)) == without_ids(token("é", 10))
