"""Recorded agent sessions: which calls a session made, how its contexts grew, how long its tools took.

Played as closed loops: a call is made when the one before has ended and its tools are done, so that a slow fleet
delays the session and not only its answers. Sessions start at a rate of the caller's, each a recorded one drawn at
random.

TraceLab (uw-syfi/TraceLab, CC-BY-4.0 / Apache-2.0): one JSON object per round. A prompt begins with the prompt and
answer before it where it grew; where it shrank (the agent cut its context) only ``prefix_tokens`` are shared. The pause
lies between the last thing the model said and the last tool result or user message of the next round.

Exgentic (inference-sim, Apache-2.0): call order and lengths only. Estimates, because the data has no more: the
system prompt of a family of sessions is its shortest first prompt less twice their spread; pauses are log-normal with a
mean the caller sets; agent and user simulator of one task take turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from autoscaling.simulator.spec import SourceFactory
from autoscaling.simulator.workload.blocks import PromptText, label_of, mix
from autoscaling.simulator.workload.lengths import log_normal
from autoscaling.simulator.workload.rates import RateCurve
from autoscaling.simulator.workload.sessions import PAUSE_S_MAX, Script, Session, call_with, sessions
from autoscaling.simulator.workload.timestamps import timestamp_ns
from autoscaling.simulator.workload.trace import Options, TraceError, check_number, count_of, csv_rows, json_rows

BLOCK_TOKENS = 128
TRACELAB_KEYS = ("session_id", "round_index", "input_tokens_total", "prefix_tokens", "output_tokens", "timing_events")
EXGENTIC_COLUMNS = ("session", "call_index", "prompt_tokens", "completion_tokens", "model", "status")
_INPUT_EVENTS = ("user_message", "tool_result")


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of a recorded session."""

    role: str
    """Whose context it is; each role of a session has its own."""
    prompt_tokens: int
    output_tokens: int
    shared_tokens: int
    """Leading prompt tokens taken over from the role's context; for a role's first call from its family's."""
    pause_s: float | None
    """``None``: not recorded."""


@dataclass(frozen=True, slots=True)
class RecordedSession:
    """Calls of one session in order."""

    name: str
    family: str
    """Sessions of one family have the same system prompts."""
    calls: tuple[RecordedCall, ...]


# --- playing ----------------------------------------------------------------------------------------------------------


def replay_sessions(
    recorded: Sequence[RecordedSession], name: str, rate_per_s: float, options: Options | None = None,
    *, pause_s_mean: float = 2.0,
) -> SourceFactory:  # fmt: skip
    """Sessions that start at ``rate_per_s``, Poisson, each a recorded one drawn at random with a context of its own.

    By default as many as were recorded. ``pause_s_mean`` is for pauses that were not recorded.
    """
    options = options or Options()
    if options.duration_s is None and options.limit is None:
        options = Options(options.scale, options.start_s, None, len(recorded), options.compress)
    check_number("pause_s_mean", pause_s_mean, to=PAUSE_S_MAX)
    if not recorded:
        raise TraceError("no sessions in it", name)

    def make(_number: int, rng: Random) -> Session:
        session = recorded[int(rng.random() * len(recorded))]
        return Session(_script(session, rng, pause_s_mean), session.family)

    return sessions(name, RateCurve.constant(rate_per_s), make, options)


def _script(session: RecordedSession, rng: Random, pause_s_mean: float) -> Script:
    texts: dict[str, PromptText] = {}
    label = rng.getrandbits(64)
    for n, call in enumerate(session.calls):
        text = texts.get(call.role)
        if text is None:
            text = texts[call.role] = PromptText(BLOCK_TOKENS)
            text.append(label_of("system", session.family, call.role), call.shared_tokens)
        elif call.shared_tokens < text.tokens:
            text.cut(call.shared_tokens)
        text.append(mix(label, 2 * n), call.prompt_tokens - text.tokens)
        pause_s = log_normal(rng, pause_s_mean, 1.0) if call.pause_s is None else call.pause_s
        last = n == len(session.calls) - 1
        yield call_with(text, pause_s, call.output_tokens, mix(label, 2 * n + 1), last=last)


def _grown(
    role: str, prompt: int, output: int, before: RecordedCall | None, first: int, pause: float | None
) -> RecordedCall:
    """A call after ``before`` (``None``: the role's first, which shares ``first`` tokens with its family)."""
    if before is None:
        shared = min(first, prompt)
    elif prompt >= before.prompt_tokens:
        shared = min(prompt, before.prompt_tokens + before.output_tokens)
    else:
        shared = min(first, prompt)
    return RecordedCall(role, prompt, output, shared, pause)


# --- TraceLab ---------------------------------------------------------------------------------------------------------


def parse_tracelab(lines: Iterable[str], name: str) -> list[RecordedSession]:
    """Sessions of a TraceLab file; raises :class:`TraceError`. Fields beside :data:`TRACELAB_KEYS` are not read."""
    calls: dict[str, list[RecordedCall]] = {}
    families: dict[str, str] = {}
    ends: dict[str, int | None] = {}
    for line, row in json_rows(lines, name):
        session = row.get("session_id")
        if not isinstance(session, str) or not session:
            raise TraceError("session_id is missing; expected a text", name, line)
        mine = calls.setdefault(session, [])
        if count_of(row, "round_index", name, line) != len(mine):
            raise TraceError(f"round_index is {row['round_index']}, expected {len(mine)}; sort by round", name, line)
        prompt = count_of(row, "input_tokens_total", name, line, at_least=1)
        prefix = count_of(row, "prefix_tokens", name, line, to=prompt)
        output = count_of(row, "output_tokens", name, line, at_least=1)
        begin, end = _times(row, name, line)
        last = ends.get(session)
        pause = max(0.0, (begin - last) / 1e9) if begin is not None and last is not None else None
        mine.append(_grown("", prompt, output, mine[-1] if mine else None, prefix, pause if mine else 0.0))
        families[session], ends[session] = str(row.get("provider", "")), end
    return [RecordedSession(s, families[s], tuple(rounds)) for s, rounds in calls.items()]


def _times(row: Mapping[str, object], name: str, line: int) -> tuple[int | None, int | None]:
    """When the round's last input was there and when the model said its last; ``None`` where no event tells."""
    events = row.get("timing_events")
    if not isinstance(events, list):
        raise TraceError("timing_events is missing; expected a list", name, line)
    begin: int | None = None
    end: int | None = None
    for event in events:
        try:
            at, is_input = timestamp_ns(event["timestamp"], zone_needed=True), event["event_type"] in _INPUT_EVENTS
        except (TypeError, KeyError):
            at, is_input = None, False
        if at is None:
            raise TraceError("a timing event needs event_type and timestamp like 2026-06-01T05:40:20.151Z", name, line)
        if is_input:
            begin = at if begin is None else max(begin, at)
        else:
            end = at if end is None else max(end, at)
    return begin, end


# --- Exgentic ---------------------------------------------------------------------------------------------------------


def parse_exgentic(lines: Iterable[str], name: str) -> list[RecordedSession]:
    """Tasks of an Exgentic file: ``family/task/role`` names a session. Raises :class:`TraceError`."""
    lengths: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for line, row in csv_rows(lines, name, EXGENTIC_COLUMNS):
        parts = row["session"].split("/")
        if len(parts) != 3 or not all(parts):
            raise TraceError(f"session {row['session'][:40]!r}: expected FAMILY/TASK/ROLE", name, line)
        mine = lengths.setdefault(f"{parts[0]}/{parts[1]}", {}).setdefault(parts[2], [])
        if count_of(row, "call_index", name, line) != len(mine):
            raise TraceError(f"call_index is {row['call_index']}, expected {len(mine)}; sort by call", name, line)
        prompt = count_of(row, "prompt_tokens", name, line, at_least=1)
        mine.append((prompt, count_of(row, "completion_tokens", name, line, at_least=1)))
    firsts: dict[tuple[str, str], list[int]] = {}
    for task, roles in lengths.items():
        for role, rows in roles.items():
            firsts.setdefault((task.split("/", maxsplit=1)[0], role), []).append(rows[0][0])
    system = {key: max(0, min(found) - 2 * (max(found) - min(found))) for key, found in firsts.items()}
    return [_exgentic_task(task, roles, system) for task, roles in lengths.items()]


def _exgentic_task(
    task: str, roles: Mapping[str, Sequence[tuple[int, int]]], system: Mapping[tuple[str, str], int]
) -> RecordedSession:
    family = task.split("/", maxsplit=1)[0]
    turns = sorted((n / len(rows), role, *row) for role, rows in roles.items() for n, row in enumerate(rows))
    calls: list[RecordedCall] = []
    before: dict[str, RecordedCall] = {}
    for _, role, prompt, output in turns:
        first = system[family, role]
        call = _grown(role, prompt, output, before.get(role), first, None if calls else 0.0)
        before[role] = call
        calls.append(call)
    return RecordedSession(task, family, tuple(calls))
