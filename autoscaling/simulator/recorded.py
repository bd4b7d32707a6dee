"""The lines of a recording, what each holds, and how a file of them is read.

A recording is a folder of JSONL files. Each process that records (a gateway, one life of the controller) is a *writer*
with files of its own, numbered from 0; every file begins with the same header but for its number. Lines are in the
order in which things happened to their writer::

    {"kind": "header", ...}             first line of every file
    {"kind": "request", ...}            gateway: one request that ended
    {"kind": "replica", "at_ns", ...}   controller: a replica's report as received; "gateway", "fleet", "start" likewise
    {"kind": "override", "at_ns", ...}  controller: a person set a value or a mode; "override_end": took it back
    {"kind": "objectives", "at_ns", ...}  controller: other objectives hold from now on
    {"kind": "tick", "at_ns", ...}      controller: one tick, its wishes and the decisions it made
    {"kind": "decision", ...}           ledger: one decision; again, with its verdict, once that is known
    {"kind": "dropped", "lines": n}     n lines are missing here: the writer's queue was full or its disk was
    {"kind": "end"}                     the writer ended in order

Times of gateways are ns since their header's ``started_ns``; times of the controller are its own monotonic clock, which
is what its decisions were made with. The wall clock stands in headers only, to lay writers beside each other.

A last line that was cut (a crash, a full disk) is left out with a warning; anything else that is not a line of this
schema raises :class:`RecordingError` with file and line. It must not hold a prompt's text: sizes and hashes only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias, get_args

from autoscaling.simulator.codec import Blocks, CodecError, Plain, decode, dumps, encode
from autoscaling.simulator.workload.trace import TraceError
from policies.config import ClassesConfig, ObjectivesConfig, PolicyConfig
from policies.control.loop import TickResult
from policies.measures import StartReport
from policies.steering import Override
from policies.types import Decision, FleetView, GatewayReport, ReplicaReport

FORMAT = "tidegate-recording"
VERSION = 2
"""Grows when a line gets or loses a field: a value that was not recorded cannot be replayed."""


class RecordingError(TraceError):
    """A recording cannot be read; the message has file, line and what is wrong."""

    def __init__(self, file: str, line: int | None, why: str) -> None:
        super().__init__(why, file, line)


@dataclass(frozen=True, slots=True)
class Header:
    """Who wrote a file, when, with which code and configuration."""

    format: str
    version: int
    source: str
    """``gateway``, ``controller``, or ``ledger``: the decisions alone, of a controller."""
    name: str
    """The gateway's replica id, or the controller's epoch."""
    file: int
    """Number of this file in its writer's life, from 0."""
    started_ns: int
    """Monotonic clock of the writer when its recording began."""
    started_unix_ns: int
    """Wall clock at the same moment."""
    code: str
    """Digest of the sources that decide (``policies/``, ``autoscaling/``)."""
    model: str
    gateways: int
    replicas: int
    """Replicas the fleet starts with."""
    report_period_ms: float
    drain_ms_max: float
    config: PolicyConfig


@dataclass(frozen=True, slots=True)
class RequestLine:
    """One request that ended at a gateway. ``None``: not known."""

    arrival_ns: int
    """Since the header's ``started_ns``."""
    endpoint: str
    stream: bool
    tenant: str
    task: str
    """Session or agent task; empty: none was told."""
    prompt_tokens: int | None
    """The engine's count."""
    prompt_tokens_estimate: int
    """What the gateway routed with."""
    prompt_bytes: int
    output_tokens: int
    """The engine's count; where it did not say, one per event of the stream."""
    output_tokens_max: int | None
    cached_tokens: int | None
    blocks: Blocks
    block_tokens: int
    """Estimated tokens of one block when the request came."""
    ttft_ms: float | None
    """Arrival to the first byte from the replica; ``None``: there was none."""
    e2e_ms: float
    outcome: str
    reason: str
    replica: str
    """The last one it was sent to; empty: none."""
    attempts: int


@dataclass(frozen=True, slots=True)
class ReplicaLine:
    """A replica's report as the controller received it."""

    at_ns: int
    report: ReplicaReport


@dataclass(frozen=True, slots=True)
class GatewayLine:
    """A gateway's report as the controller received it."""

    at_ns: int
    report: GatewayReport


@dataclass(frozen=True, slots=True)
class FleetLine:
    """Serve's word as the controller received it."""

    at_ns: int
    view: FleetView


@dataclass(frozen=True, slots=True)
class StartLine:
    """What a replica said of its start, as received."""

    at_ns: int
    report: StartReport


@dataclass(frozen=True, slots=True)
class OverrideLine:
    """A person set a value or a mode by hand, and the controller took it."""

    at_ns: int
    override: Override


@dataclass(frozen=True, slots=True)
class OverrideEndLine:
    """A person took an override back."""

    at_ns: int
    id: str


@dataclass(frozen=True, slots=True)
class ObjectivesLine:
    """Other objectives hold from now on."""

    at_ns: int
    objectives: ObjectivesConfig
    classes: ClassesConfig


@dataclass(frozen=True, slots=True)
class ConditionNote:
    """A condition that was active when a decision was made, with its figures."""

    name: str
    since_ns: int | None
    text: str
    evidence: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class DecisionLine:
    """One decision of the controller, as its ledger had it when this was written; the last one of a ``seq`` counts."""

    at_unix_ns: int
    """Wall clock at the tick that made the decision."""
    decision: Decision
    conditions: tuple[ConditionNote, ...]


@dataclass(frozen=True, slots=True)
class TickLine:
    """One tick. Wishes are those before the mode was applied, so that shadow mode is recorded in full."""

    at_ns: int
    tick: int
    failed: str
    """Type and words of the exception that ended it; empty: none."""
    replicas_target: int | None
    affinity_strength: float | None
    conditions: tuple[str, ...]
    """Names of the active ones."""
    decisions: tuple[Decision, ...]
    """New entries of the ledger."""


@dataclass(frozen=True, slots=True)
class DroppedLine:
    """Lines that are missing here."""

    lines: int


@dataclass(frozen=True, slots=True)
class EndLine:
    """The writer ended in order."""


InputLine: TypeAlias = (
    ReplicaLine | GatewayLine | FleetLine | StartLine | OverrideLine | OverrideEndLine | ObjectivesLine
)
"""What a controller decides from."""
Line: TypeAlias = Header | RequestLine | InputLine | TickLine | DecisionLine | DroppedLine | EndLine

_KINDS: Mapping[str, type[Any]] = MappingProxyType(
    {
        "header": Header,
        "request": RequestLine,
        "replica": ReplicaLine,
        "gateway": GatewayLine,
        "fleet": FleetLine,
        "start": StartLine,
        "override": OverrideLine,
        "override_end": OverrideEndLine,
        "objectives": ObjectivesLine,
        "tick": TickLine,
        "decision": DecisionLine,
        "dropped": DroppedLine,
        "end": EndLine,
    }
)
_NAMES = {kind: name for name, kind in _KINDS.items()}
_OF_SOURCE = {
    "gateway": frozenset({RequestLine, DroppedLine, EndLine}),
    "controller": frozenset({*get_args(InputLine), TickLine, DroppedLine, EndLine}),
    "ledger": frozenset({DecisionLine, DroppedLine, EndLine}),
}


def tick_line(result: TickResult, at_ns: int) -> TickLine:
    """What is recorded of a tick at ``at_ns``."""
    return TickLine(
        at_ns=at_ns,
        tick=result.plan.seq,
        failed="",
        replicas_target=result.adaptation.replicas_target,
        affinity_strength=result.adaptation.affinity_strength,
        conditions=tuple(c.name for c in result.conditions if c.active),
        decisions=result.decisions,
    )


def failed_tick_line(error: Exception, tick: int, at_ns: int) -> TickLine:
    """What is recorded of a tick that raised ``error``."""
    return TickLine(at_ns, tick, f"{type(error).__name__}: {error}", None, None, (), ())


def to_text(line: Line) -> str:
    """``line`` as it stands in a file, without the line break."""
    return dumps({"kind": _NAMES[type(line)], **encode(line)})


def from_text(text: str) -> Line:
    """The line that ``text`` holds.

    Raises:
        CodecError: it is JSON, but not a line of this schema.
        json.JSONDecodeError: it is not JSON.
    """
    plain = json.loads(text)
    if not isinstance(plain, dict):
        raise CodecError("", "must be an object")
    return _line_of(plain)


def _line_of(plain: dict[str, Plain]) -> Line:
    name = plain.pop("kind", None)
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise CodecError("kind", f"{name!r} is not one of {', '.join(_KINDS)}")
    if kind is Header and (plain.get("format"), plain.get("version")) != (FORMAT, VERSION):
        found = f"{plain.get('format')!r} version {plain.get('version')!r}"
        raise CodecError("", f"{found} cannot be read; this is {FORMAT!r} version {VERSION}")
    if kind is Header:
        plain["config"] = _with_defaults(plain.get("config"))
    decoded: Line = decode(kind, plain)
    return decoded


def _with_defaults(config: Plain) -> Plain:
    """Settings that are younger than the recording have their defaults."""
    if not isinstance(config, dict):
        return config
    defaults: dict[str, Plain] = encode(PolicyConfig())
    return {
        **config,
        **{
            family: {**values, **given}
            if isinstance(values, dict) and isinstance(given := config.get(family), dict)
            else config.get(family, values)
            for family, values in defaults.items()
        },
    }


# --- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Numbered:
    """A line and where it stands."""

    file: str
    number: int
    line: Line


def read_lines(lines: Iterable[str], file: str, warn: Callable[[str], None]) -> Iterator[Numbered]:
    """The lines of one file, the header first.

    ``lines`` carry their line breaks. ``warn`` is told of a last line that was cut and of an empty file.

    Raises:
        RecordingError: the file is not a recording, or a line is not what it should be.
    """
    header: Header | None = None
    for number, text, last in _with_last(lines):
        if last and not text.endswith("\n"):
            warn(f"{file}:{number}: the last line was cut and is left out")
            break
        try:
            line = from_text(text)
        except json.JSONDecodeError as error:
            raise RecordingError(file, number, f"not JSON: {error.msg} at column {error.colno}") from None
        except RecursionError:
            raise RecordingError(file, number, "nested too deeply") from None
        except CodecError as error:
            raise RecordingError(file, number, str(error)) from None
        header = _check_place(line, header, file, number)
        yield Numbered(file, number, line)
    if header is None:
        warn(f"{file}: empty, nothing was recorded in it")


def _check_place(line: Line, header: Header | None, file: str, number: int) -> Header:
    if header is None:
        if not isinstance(line, Header):
            raise RecordingError(file, number, "the first line is not a header: this is no file of a recording")
        if line.source not in _OF_SOURCE:
            raise RecordingError(file, number, f"source: {line.source!r} must be one of {', '.join(_OF_SOURCE)}")
        return line
    if type(line) not in _OF_SOURCE[header.source]:
        raise RecordingError(file, number, f"kind: {_NAMES[type(line)]!r} does not belong to a {header.source}")
    return header


def _with_last(lines: Iterable[str]) -> Iterator[tuple[int, str, bool]]:
    """Number, text, and whether it is the last; blank lines are left out."""
    held: tuple[int, str] | None = None
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        if held is not None:
            yield (*held, False)
        held = (number, text)
    if held is not None:
        yield (*held, True)
