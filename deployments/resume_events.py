"""Events of a stream with token ids as bytes: the forms that both engines send, and what is read and changed in them.

Forms are vLLM 0.29.0's: compact JSON, fields in this order. An event that does not fit is of unknown form, and ends
what :mod:`deployments.resume` can promise. Text is written anew only where a part of it has to go.
"""

from __future__ import annotations

import re

import msgspec

EVENT_END = b"\n\n"
DONE = b"data: [DONE]\n\n"
ABORTED = b'"abort"'
"""``finish_reason`` of an answer that the engine gave up, as it does when it is told to end."""
ABORTED_EVENT = (
    b'data: {"error":{"message":"The engine gave the request up.","type":"server_error","param":null,'
    b'"code":"engine_error"}}\n\n'
)
PROMPT_IDS = b'"prompt_token_ids":['
NO_CHOICES = b'"choices":[]'

_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*"'
_TEXT = rb'"([^"\\]*(?:\\.[^"\\]*)*)"'
_HEAD = rb'(data: \{"id":' + _STRING + rb',"object":"%b","created":\d+,"model":' + _STRING + rb',"choices":\[)'
_CHAT_HEAD, _TEXT_HEAD = _HEAD % rb"chat\.completion\.chunk", _HEAD % b"text_completion"
_FINISH = rb'(?P<finish>null|"\w+")'
_STOP = rb"(?P<stop>null|-?\d+|" + _STRING + rb")"
_IDS = rb'"token_ids":\[(?P<ids>[\d,]*)\]'
_REST = rb"\}\](?P<rest>,.*)?\}\n\n"

ROLE = re.compile(
    _CHAT_HEAD
    + rb'\{"index":0,"delta":\{"role":' + _STRING + rb',"content":""\},"logprobs":null,"finish_reason":null\}\]'
    + rb'(?:,"usage":\{"prompt_tokens":\d+,"total_tokens":\d+,"completion_tokens":\d+(?P<tail>[^}]*)\})?'
    + rb',"prompt_token_ids":\[(?P<prompt>[\d,]*)\],"prompt_text":(?:null|' + _STRING + rb")\}\n\n"
)  # fmt: skip
CHAT = re.compile(
    _CHAT_HEAD
    + rb'\{"index":0,"delta":\{"content":' + _TEXT + rb'\},"logprobs":null,"finish_reason":' + _FINISH
    + rb'(?:,"stop_reason":' + _STOP + rb")?," + _IDS + _REST,
    re.DOTALL,
)  # fmt: skip
COMPLETION = re.compile(
    _TEXT_HEAD
    + rb'\{"index":0,"text":' + _TEXT + rb',"logprobs":null,"finish_reason":' + _FINISH + rb',"stop_reason":' + _STOP
    + rb',"prompt_token_ids":(?:null|\[(?P<prompt>[\d,]*)\]),' + _IDS + _REST,
    re.DOTALL,
)  # fmt: skip
USAGE = re.compile(rb'"usage":\{"prompt_tokens":\d+,"total_tokens":\d+,"completion_tokens":(\d+)([^}]*)\}')

CHAT_OPEN, TEXT_OPEN = b'{"index":0,"delta":{"content":"', b'{"index":0,"text":"'
CHAT_MIDDLE = b'"},"logprobs":null,"finish_reason":null,"token_ids":['
TEXT_MIDDLE = b'","logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":['


HEAD_FIELDS = frozenset({"id", "object", "created", "model", "choices"})


def lifted(event: bytes) -> tuple[bytes, bytes]:
    """``event`` with an empty list of the prompt's ids, and what was inside: far too long to be matched like text."""
    start = event.find(PROMPT_IDS) + len(PROMPT_IDS)
    if start < len(PROMPT_IDS):
        return event, b""
    end = event.find(b"]", start)
    return event[:start] + event[end:], event[start:end]


def nulled(event: bytes, spans: list[tuple[int, int]]) -> bytes:
    """``event`` with ``null`` in the place of lists whose insides are at ``spans``, in order."""
    parts, at = [], 0
    for start, end in spans:
        parts += [event[at : start - 1], b"null"]
        at = end + 1
    return b"".join([*parts, event[at:]])


def count_ids(ids: bytes | bytearray) -> int:
    """Ids in a list with a comma behind each."""
    return ids.count(b",")


def chars_of(text: bytes) -> int:
    """Characters of the inside of a JSON string."""
    return len(_decoded(text)) if b"\\" in text else len(text.decode("utf-8", "replace"))


def _decoded(text: bytes) -> str:
    found: str = msgspec.json.decode(b'"' + text + b'"')
    return found


def without(text: bytes, chars: int) -> bytes:
    """The inside of a JSON string without its first ``chars`` characters."""
    return msgspec.json.encode(_decoded(text)[chars:])[1:-1]
