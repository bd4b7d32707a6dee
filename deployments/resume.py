"""The journal of one stream: what its client has, so that another replica can go on where the first was lost.

The gateway adds ``return_token_ids`` to the request. :meth:`Journal.take` then writes down the token ids of each event
and takes them out again, which leaves the bytes the engine would have sent without. After a cut
:meth:`Journal.continuation` asks another replica for the rest,

    prompt = prompt ids + ids of the answer up to the resume point          (POST /v1/completions)

and :meth:`Journal.take_resumed` writes its events in the terms of the first stream: same id, creation time and
endpoint, usage counted over both parts. The client sees one stream.

**Resume point.** Not always the last token seen: text may lag behind tokens. A character split over tokens comes with
its last token; an engine that looks for stop strings holds characters back. The point is the last token after which the
engine's decoder was clean (an event of one token that brought text), and with stop strings, one early enough that a
stop string that began before the cut is found again. Tokens after the point are computed again. Where the client has
text of them, they are compared with those known, and that text is dropped. A difference raises
:class:`ResumeMismatchError`: exact or not at all.

Only whole events are passed on; the beginning of one waits for its rest. An error event of the engine is kept in
:attr:`Journal.error` and not passed on, because the stream may be resumed instead.

It must not do input or output, and it must not decide whether to resume.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec

from deployments.relay import ERROR_KEY, has_stream_error
from deployments.resume_events import (
    ABORTED,
    ABORTED_EVENT,
    CHAT,
    CHAT_MIDDLE,
    CHAT_OPEN,
    COMPLETION,
    DONE,
    EVENT_END,
    HEAD_FIELDS,
    NO_CHOICES,
    ROLE,
    TEXT_MIDDLE,
    TEXT_OPEN,
    USAGE,
    chars_of,
    count_ids,
    lifted,
    nulled,
    without,
)
from deployments.resume_plan import (
    CHAT_PATH,
    COMPLETIONS_PATH,
    ResumePlan,
    continuation_fields,
    engine_reason,
    plan_of,
    splice,
)

__all__ = [
    "JOURNAL_BYTES_MAX",
    "Journal",
    "ResumeMismatchError",
    "ResumePlan",
    "engine_reason",
    "plan_of",
    "splice",
]

JOURNAL_BYTES_MAX = 4_194_304
"""Bytes of token ids (about six each, prompt and answer) and of an unfinished event that one journal keeps."""


class ResumeMismatchError(Exception):
    """A continuation does not fit what the client has: end the stream with an error."""


class Journal:
    """One stream of one client, over as many replicas as it takes."""

    __slots__ = (
        "_base_tokens",
        "_broken",
        "_clean",
        "_done",
        "_drop_chars",
        "_drop_tokens",
        "_expected",
        "_finished",
        "_from_start",
        "_head",
        "_loose_chars",
        "_marks",
        "_middle",
        "_open_bytes",
        "_passed",
        "_pending",
        "_prompt",
        "_resumed",
        "_sent_chars",
        "_start",
        "_tokens",
        "_usage_sent",
        "_usage_tail",
        "closed_here",
        "error",
        "plan",
    )

    def __init__(self, plan: ResumePlan) -> None:
        self.plan = plan
        self.error: bytes | None = None
        """An engine's error event, not passed on; nothing after it was."""
        self.closed_here = False
        """The end was written here; the engine that wrote the answer did not get to it."""
        self._broken = ""
        self._pending = b""
        self._passed = False
        self._prompt: bytes | None = None
        self._head = b""
        self._start = b"\0"
        self._open_bytes = 0
        self._middle = CHAT_MIDDLE if plan.chat else TEXT_MIDDLE
        self._usage_tail: bytes | None = None
        self._tokens = bytearray()
        """Ids of the answer's tokens, each with a comma behind it."""
        self._clean = 0
        """Resume point in ``_tokens``, without stop strings."""
        self._loose_chars = 0
        """Characters the client has from tokens after it."""
        self._sent_chars = 0
        """Characters the client has; counted with stop strings only."""
        self._marks: deque[tuple[int, int]] = deque()
        """Possible resume points with stop strings: place in ``_tokens``, characters sent with it. At most one for each
        character that a stop string may reach back, and one more."""
        self._finished = self._usage_sent = self._done = False
        self._resumed = False
        self._base_tokens = 0
        self._expected: deque[bytes] = deque()
        self._drop_chars = 0
        self._drop_tokens = 0
        """Tokens of which the client has events without text, and which are made anew."""
        self._from_start = False

    # --- what the driver asks -----------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """The answer is complete; at most usage and the end mark are missing: see :meth:`closing`."""
        return self._finished

    @property
    def resumable(self) -> bool:
        """Whether the stream, cut now, could go on exactly on another replica, if there is room for more."""
        return not self.reason

    def goes_on(self, context_tokens_max: int | None) -> bool:
        """Whether there would be a :meth:`continuation`."""
        if not self.resumable or self._prompt is None:
            return self.resumable
        return (self._room(context_tokens_max) or 0) > count_ids(bytes(self._tokens[: self._point()[0]]))

    @property
    def reason(self) -> str:
        """Why it could not; empty when it could."""
        if self._broken:
            return self._broken
        if self._finished or self._done:
            return "the answer is complete"
        if self._prompt is None:
            return "no token ids" if self._passed else ""
        at, drop_chars = self._point()
        if not self.plan.greedy and (drop_chars or (self.plan.ids_asked and at < len(self._tokens))):
            return "sampled tokens whose text is cut"
        return ""

    @property
    def prompt_tokens(self) -> int | None:
        """Tokens of the prompt; ``None`` before the first event."""
        return None if self._prompt is None else count_ids(self._prompt + b",")

    @property
    def output_tokens(self) -> int:
        """Tokens of the answer so far."""
        return count_ids(self._tokens)

    # --- the first replica's stream -----------------------------------------------------------------------------------

    def take(self, chunk: bytes) -> bytes:
        """Write down ``chunk``, as it came off the socket; what the client gets of it, perhaps nothing yet."""
        middle = chunk.rfind(self._middle)
        if middle < 0 or self._pending or not chunk.startswith(self._start) or chunk.find(EVENT_END) + 2 < len(chunk):
            return self._take_events(chunk)
        return self._take_token(chunk, middle)

    def flush(self) -> bytes:
        """The beginning of an event that was never completed, when the stream ended all the same."""
        pending, self._pending = self._pending, b""
        return pending

    def _take_token(self, event: bytes, middle: int) -> bytes:
        """An event with text and ids that is not the last: nearly all are. ``middle``: where its text ends."""
        tokens, start = self._tokens, middle + len(self._middle)
        end = event.find(b"]", start)
        ids = event[start:end]
        if ids:
            tokens += ids
            tokens += b","
        if middle > self._open_bytes and b"," not in ids and ids and not self.plan.stop_chars:
            self._clean, self._loose_chars = len(tokens), 0
        else:
            self._note(event[self._open_bytes : middle], ids)
        if len(tokens) > JOURNAL_BYTES_MAX:
            self._give_up("too many tokens")
        return event if self.plan.ids_asked else event[: start - 1] + b"null" + event[end + 1 :]

    def _note(self, text: bytes, ids: bytes) -> None:
        """Move the resume point after an event with ``text``, the inside of a JSON string, and ``ids``."""
        self._moved(chars_of(text), chars_of(text), bool(ids) and b"," not in ids)

    def _moved(self, chars: int, new_chars: int, single: bool) -> None:
        """An event brought ``chars`` characters, ``new_chars`` of which the client did not have."""
        at, reach = len(self._tokens), self.plan.stop_chars
        if not reach:
            if chars and single:
                self._clean, self._loose_chars = at, 0
            else:
                self._loose_chars += new_chars
            return
        self._sent_chars = sent = self._sent_chars + new_chars
        marks = self._marks
        if chars and single:
            marks.append((at, sent))
        while len(marks) > 1 and marks[1][1] <= sent - reach:
            marks.popleft()

    def _take_events(self, chunk: bytes) -> bytes:
        out = b"".join([self._take_event(event) for event in self._events(chunk)])
        self._passed = self._passed or bool(out)
        return out

    def _events(self, chunk: bytes) -> list[bytes]:
        """The events that are complete with ``chunk``."""
        data = self._pending + chunk
        end = data.rfind(EVENT_END)
        if end < 0 and len(data) > JOURNAL_BYTES_MAX:
            self._give_up("too long an event")
            self._pending = b""
            return [data]
        self._pending = data[end + 2 :] if end >= 0 else data
        return [event + EVENT_END for event in data[:end].split(EVENT_END)] if end >= 0 else []

    def _take_event(self, event: bytes) -> bytes:
        if self.error is not None or self._is_error(event):
            return b""
        middle = event.rfind(self._middle) if event.startswith(self._start) else -1
        if middle >= 0:
            return self._take_token(event, middle)
        if event == DONE:
            self._done = True
            return event
        if self._prompt is None:
            return self._take_first(event)
        if NO_CHOICES in event and event.startswith(self._head + b"]"):
            self._usage_sent = True
            return event
        found = (CHAT if self.plan.chat else COMPLETION).fullmatch(event)
        if found is None:
            self._give_up("an event of unknown form")
            return event
        if not self._took(found):
            return b""
        return event if self.plan.ids_asked else nulled(event, [found.span("ids")])

    def _take_first(self, event: bytes) -> bytes:
        """The first event, which brings the prompt's ids: of a chat the role, of a completion its first text."""
        if self._broken:
            return event
        small, prompt = lifted(event)
        found = (ROLE if self.plan.chat else COMPLETION).fullmatch(small)
        if found is None or not prompt or len(prompt) > JOURNAL_BYTES_MAX:
            self._give_up("a first event of unknown form" if prompt else "no token ids")
            return event
        self._prompt, self._head = prompt, found[1]
        self._start = self._head + (CHAT_OPEN if self.plan.chat else TEXT_OPEN)
        self._open_bytes = len(self._start)
        spans = [found.span("prompt")]
        if self.plan.chat:
            self._usage_tail = found["tail"]
        elif self._took(found):
            spans.append(found.span("ids"))
        else:
            return b""
        return event if self.plan.ids_asked else nulled(small, spans)

    def _took(self, found: re.Match[bytes]) -> bool:
        """Write down one event; not one that says that the engine gave the answer up."""
        if found["finish"] == ABORTED:
            self.error = ABORTED_EVENT
            return False
        if found["ids"]:
            self._tokens += found["ids"] + b","
        self._note(found[2], found["ids"])
        self._finished = found["finish"] != b"null"
        return True

    def _is_error(self, event: bytes) -> bool:
        if ERROR_KEY in event and has_stream_error(event):
            self.error = event
        return self.error is not None

    def _give_up(self, why: str) -> None:
        self._broken = self._broken or why
        self._tokens.clear()
        self._marks.clear()
        self._clean = 0

    # --- after a cut --------------------------------------------------------------------------------------------------

    def _point(self) -> tuple[int, int]:
        """Resume point in ``_tokens``, and how many characters the client has from tokens after it."""
        reach, held = self.plan.stop_chars, self.plan.held_chars
        if not reach:
            return self._clean, self._loose_chars
        sent = self._sent_chars
        if self._from_start:
            return 0, sent
        at, had = next((m for m in reversed(self._marks) if m[1] <= sent - reach), (0, -held))
        return at, sent - had - held

    def continuation(self, fields: Mapping[str, Any], context_tokens_max: int | None) -> tuple[str, bytes] | None:
        """Path and body of the request for the rest; ``None`` when there can be none.

        ``fields`` are those of the request body. While nothing was passed on, this is the whole request again. May be
        asked for again, for an attempt that did not come about.
        """
        self._pending, self.error = b"", None
        if self.reason:
            return None
        if self._prompt is None:
            self._tokens.clear()
            path = CHAT_PATH if self.plan.chat else COMPLETIONS_PATH
            return path, msgspec.json.encode({**fields, "return_token_ids": True})
        at, drop_chars = self._point()
        before = bytes(self._tokens[:at])
        made, room = count_ids(before), self._room(context_tokens_max)
        if room is None or room <= made:
            return None
        expected = bytes(self._tokens[at:]).split(b",")[:-1]
        if not drop_chars and not self.plan.ids_asked:  # the client has no text of them: others are as good
            self._drop_tokens, expected = self._drop_tokens + len(expected), []
            del self._tokens[at:]
        self._resumed, self._base_tokens = True, made
        self._drop_chars, self._expected = drop_chars, deque(expected)
        prompt = b'"prompt":[' + (self._prompt + b"," + before)[:-1] + b"]}"
        rest = msgspec.json.encode(continuation_fields(fields, self.plan, made, room - made))
        return COMPLETIONS_PATH, rest[:-1] + b"," + prompt

    def _mismatch(self, why: str) -> ResumeMismatchError:
        """What to raise. With stop strings there is one more way: to compute all again as the first replica did."""
        if self._from_start or not self.plan.stop_chars:
            self._give_up(f"the continuation has {why}")
        self._from_start = True
        return ResumeMismatchError(why)

    def _room(self, context_tokens_max: int | None) -> int | None:
        """Output tokens the whole answer may have."""
        if self.plan.tokens_max is not None:
            return self.plan.tokens_max
        if context_tokens_max is None or self.prompt_tokens is None:
            return None
        return context_tokens_max - self.prompt_tokens

    def closing(self) -> bytes:
        """What is missing after the answer is complete: usage where it was asked for, the end mark."""
        out = b""
        if self.plan.usage and not self._usage_sent and not self._done:
            self._usage_sent = True
            usage = {
                "prompt_tokens": self.prompt_tokens or 0,
                "total_tokens": 0,
                "completion_tokens": self.output_tokens,
            }
            usage["total_tokens"] = usage["prompt_tokens"] + usage["completion_tokens"]
            out = self._head + b'],"usage":' + msgspec.json.encode(usage) + b"}" + EVENT_END
        out += b"" if self._done else DONE
        self._done = self.closed_here = True
        return out

    # --- another replica's stream -------------------------------------------------------------------------------------

    def take_resumed(self, chunk: bytes) -> bytes:
        """As :meth:`take`, for the answer to a :meth:`continuation`.

        Raises:
            ResumeMismatchError: the replica says something else than the first one did. Nothing of it was passed on;
                :attr:`resumable` says whether another way is left.
        """
        if not self._resumed:
            return self.take(chunk)
        out = b""
        for event in self._events(chunk):
            try:
                out += self._resumed_event(event)
            except ResumeMismatchError:
                if not out:
                    raise
                self.error = ABORTED_EVENT  # what fitted reaches the client first
                break
        return out

    def _resumed_event(self, event: bytes) -> bytes:
        if self.error is not None or self._is_error(event):
            return b""
        found = COMPLETION.fullmatch(event)
        if found is not None:
            return self._resumed_token(found)
        if event == DONE:
            self._done = True
            return event
        if NO_CHOICES in event:
            self._usage_sent = True
            return self._resumed_usage(event)
        raise self._mismatch("an event of unknown form")

    def _resumed_token(self, found: re.Match[bytes]) -> bytes:
        """One event of the continuation in the terms of the first stream; nothing for what the client has."""
        if found["finish"] == ABORTED:
            self.error = ABORTED_EVENT
            return b""
        given = found["ids"].split(b",") if found["ids"] else []
        known = min(len(given), len(self._expected))
        if any(self._expected.popleft() != token for token in given[:known]):
            raise self._mismatch("another token than before")
        fresh, ended = given[known:], found["finish"] != b"null"
        chars = chars_of(found[2])
        dropped = min(chars, self._drop_chars)
        self._drop_chars -= dropped
        if not fresh and not ended:
            if chars > dropped:
                raise self._mismatch("more text than before")
            return b""
        if self._drop_chars or self._expected:
            raise self._mismatch("less than before")
        self._tokens += b"".join([token + b"," for token in fresh])
        if self._drop_tokens:
            self._drop_tokens = max(0, self._drop_tokens - len(fresh))
            if not chars and not ended:
                return b""
            self._drop_tokens = 0
        self._moved(chars, chars - dropped, len(given) == 1)
        if len(self._tokens) > JOURNAL_BYTES_MAX:
            self._give_up("too many tokens")
        self._finished = ended
        text = without(found[2], dropped) if dropped else found[2]
        return self._written(text, b",".join(fresh), found)

    def _written(self, text: bytes, fresh: bytes, found: re.Match[bytes]) -> bytes:
        ids = b"[" + fresh + b"]" if self.plan.ids_asked else b"null"
        finish, stop = found["finish"], found["stop"]
        if self.plan.chat:
            stop = b',"stop_reason":' + stop if finish != b"null" else b""
            choice = text + b'"},"logprobs":null,"finish_reason":' + finish + stop
        else:
            choice = text + b'","logprobs":null,"finish_reason":' + finish + b',"stop_reason":' + stop
            choice += b',"prompt_token_ids":null'
        rest = USAGE.sub(self._summed, found["rest"] or b"", 1)
        return self._start + choice + b',"token_ids":' + ids + b"}]" + rest + b"}" + EVENT_END

    def _summed(self, found: re.Match[bytes]) -> bytes:
        """A running usage over both parts."""
        prompt, made = self.prompt_tokens or 0, self._base_tokens + int(found[1])
        tail = found[2] if self._usage_tail is None else self._usage_tail
        return b'"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d%b}' % (
            prompt, prompt + made, made, tail,
        )  # fmt: skip

    def _resumed_usage(self, event: bytes) -> bytes:
        """The last usage event, over both parts. Cached tokens are those of the prompt on the last replica."""
        try:
            last = msgspec.json.decode(event[len(b"data: ") :])
            usage = last["usage"]
            prompt, made = self.prompt_tokens or 0, self._base_tokens + usage["completion_tokens"]
        except (msgspec.DecodeError, KeyError, TypeError):
            raise self._mismatch("a usage event of unknown form") from None
        usage |= {"prompt_tokens": prompt, "total_tokens": prompt + made, "completion_tokens": made}
        details = usage.get("prompt_tokens_details")
        if details is not None and details.get("cached_tokens") is not None:
            details["cached_tokens"] = min(details["cached_tokens"], prompt)
            if self.plan.chat:
                details.setdefault("created_cache_tokens", 0)
        rest = {name: value for name, value in last.items() if name not in HEAD_FIELDS}
        return self._head + b"]," + msgspec.json.encode(rest)[1:] + EVENT_END
