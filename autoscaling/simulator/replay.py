"""Feeds the recorded inputs of a controller to the live control loop again and compares what it decides.

The loop (``policies.control.loop``) is a function of its configuration, of the reports it received with their times of
receipt, and of the times of its ticks. A recording holds all of these, so a replay with the same code and configuration
must give the same wishes and decisions byte for byte, in the canonical form of ``codec.canonical``. With another
configuration or scaler it says what *would* have been decided on the same inputs (the inputs themselves stay as they
were: for their answer to other decisions simulate the traffic).

The loop starts without a past, so a replay needs a controller's whole life: its files from number 0 on, none missing.
It stops at the first dropped line, because a missing input may change anything after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoscaling.recommend import ReplicaScaler
from autoscaling.simulator.codec import canonical, encode
from autoscaling.simulator.recorded import (
    DroppedLine,
    EndLine,
    FleetLine,
    GatewayLine,
    Header,
    InputLine,
    Numbered,
    ObjectivesLine,
    OverrideEndLine,
    OverrideLine,
    RecordingError,
    ReplicaLine,
    StartLine,
    TickLine,
    failed_tick_line,
    tick_line,
)
from autoscaling.warm import WarmPool
from policies.build import build_control
from policies.config import PolicyConfig
from policies.control.loop import ControlState, tick
from policies.control.scaler import Scaler

DIFFERENCES_MAX = 20
"""Fields of one tick that are told apart; one more says how many there are."""


@dataclass(frozen=True, slots=True)
class Writer:
    """One process that recorded: a gateway, or one life of a controller."""

    header: Header
    """Of its first file that is there."""
    files: tuple[str, ...]
    """Names in order."""
    numbers: tuple[int, ...]

    @property
    def missing(self) -> str:
        """Which files are gone, in words; empty: none."""
        first, last = self.numbers[0], self.numbers[-1]
        if first > 0:
            gone = "file 0 is" if first == 1 else f"files 0 to {first - 1} are"
            return f"{gone} gone, files {first} to {last} are there"
        holes = sorted(set(range(last + 1)) - set(self.numbers))
        return f"file {holes[0]} is gone" if holes else ""


def writers_of(heads: Iterable[tuple[str, Header]]) -> list[Writer]:
    """Group files by who wrote them, in order of their start.

    Raises:
        RecordingError: two files have the same number of the same writer.
    """
    groups: dict[tuple[str, str, int], list[tuple[int, str, Header]]] = {}
    for file, header in heads:
        group = groups.setdefault((header.source, header.name, header.started_unix_ns), [])
        twin = next((name for number, name, _ in group if number == header.file), None)
        if twin is not None:
            raise RecordingError(file, 1, f"is the same file of the same {header.source} as {twin}")
        group.append((header.file, file, header))
    found = []
    for group in groups.values():
        group.sort(key=lambda item: item[0])
        found.append(Writer(group[0][2], tuple(f for _, f, _ in group), tuple(n for n, _, _ in group)))
    return sorted(found, key=lambda w: (w.header.source, w.header.started_unix_ns, w.header.name))


# --- decisions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Replayed:
    """One tick as it was recorded and as it came out again."""

    file: str
    number: int
    recorded: TickLine
    replayed: TickLine

    @property
    def equal(self) -> bool:
        """Byte for byte."""
        return canonical(self.recorded) == canonical(self.replayed)


@dataclass(frozen=True, slots=True)
class Lost:
    """The recording has a hole here; what comes after it cannot be replayed."""

    file: str
    number: int
    lines: int


def replay_decisions(
    lines: Iterable[Numbered],
    config: PolicyConfig | None = None,
    make_scaler: Callable[[PolicyConfig], Scaler] = ReplicaScaler,
) -> Iterator[Replayed | Lost]:
    """Replay one controller's life: one :class:`Replayed` per tick; :class:`Lost` at the first hole is the last.

    Args:
        lines: all lines of its files in order, headers included.
        config: another configuration than the recorded one.
        make_scaler: another scaler than the live one.

    Raises:
        RecordingError: a line is wrong, or the life is not recorded from its beginning.
    """
    state: ControlState | None = None
    files = 0
    for item in lines:
        match item.line:
            case Header() as header:
                if header.file != files:
                    why = f"file {files} of this controller is missing: its decisions cannot be replayed"
                    raise RecordingError(item.file, item.number, why)
                files += 1
                if state is None:
                    chosen = config or header.config
                    state = build_control(chosen, make_scaler(chosen), header.name, pool=WarmPool(chosen))
            case DroppedLine(lines=count):
                yield Lost(item.file, item.number, count)
                return
            case TickLine() as recorded:
                assert state is not None
                yield Replayed(item.file, item.number, recorded, _tick(state, recorded.at_ns))
            case (
                ReplicaLine()
                | GatewayLine()
                | FleetLine()
                | StartLine()
                | OverrideLine()
                | OverrideEndLine()
                | ObjectivesLine() as line
            ):
                assert state is not None
                _receive(state, line)
            case EndLine():
                return
            case _:
                raise RecordingError(item.file, item.number, "does not belong to a controller's recording")


def _receive(state: ControlState, line: InputLine) -> None:
    """As live: a report that raises is its sender's failure, and the controller goes on."""
    try:
        match line:
            case ReplicaLine(at_ns=at_ns, report=replica):
                state.receive_replica(replica, at_ns)
            case GatewayLine(at_ns=at_ns, report=gateway):
                state.receive_gateway(gateway, at_ns)
            case FleetLine(at_ns=at_ns, view=view):
                state.receive_fleet(view, at_ns)
            case StartLine(at_ns=at_ns, report=start):
                state.receive_start(start, at_ns)
            case OverrideLine(at_ns=at_ns, override=override):
                state.overrides.put(override, at_ns)
            case OverrideEndLine(at_ns=at_ns, id=override_id):
                state.overrides.drop(override_id, at_ns)
            case ObjectivesLine(objectives=objectives, classes=classes):
                state.reconfigure(objectives, classes)
    except Exception:  # noqa: BLE001, S110 (a report that made the live loop raise makes this one raise as well)
        pass


def _tick(state: ControlState, at_ns: int) -> TickLine:
    try:
        return tick_line(tick(state, at_ns), at_ns)
    except Exception as error:  # noqa: BLE001 (a tick that failed live must fail here, in the same words)
        return failed_tick_line(error, state.ticks, at_ns)


# --- differences ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Difference:
    """One field that came out otherwise. Values are plain JSON; ``None`` also stands for one that is not there."""

    tick: int
    field: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        return f"tick {self.tick}: {self.field}: recorded {_words(self.recorded)}, replayed {_words(self.replayed)}"


def differences(recorded: TickLine, replayed: TickLine) -> list[Difference]:
    """Fields that differ, at most :data:`DIFFERENCES_MAX`, in the order of their names."""
    found = []
    for field, was, now in _compare("", encode(recorded), encode(replayed)):
        found.append(Difference(recorded.tick, field, was, now))
        if len(found) == DIFFERENCES_MAX:
            break
    return found


def _compare(path: str, was: Any, now: Any) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(was, Mapping) and isinstance(now, Mapping):
        for key in sorted({*was, *now}):
            yield from _compare(f"{path}.{key}" if path else key, was.get(key), now.get(key))
    elif isinstance(was, Sequence) and isinstance(now, Sequence) and not isinstance(was, str):
        for i in range(max(len(was), len(now))):
            yield from _compare(f"{path}[{i}]", _at(was, i), _at(now, i))
    elif canonical(was) != canonical(now):
        yield path, was, now


def _at(items: Sequence[Any], i: int) -> Any:
    return items[i] if i < len(items) else None


def _words(value: Any) -> str:
    text = canonical(value)
    return text if len(text) <= 160 else text[:157] + "..."
