"""Recorded requests: how a trace is checked, kept and played.

A parser reads lines and fills a :class:`Table`, whole and before the run, so that a bad line is reported at once and
not in the middle of a simulation. :class:`TraceSource` plays a table: ``arrival = (recorded - start) / scale``.

What this must not do: open files (``deployments/simulation/files.py`` does), or mend what it reads.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from autoscaling.simulator.spec import SimRequest, SourceFactory
from policies.types import BlockHash

TOKENS_MAX = 10_000_000
"""Most tokens one request may claim; more is an error of the trace."""
ROWS_MAX = 20_000_000
"""Most rows of one trace."""
TIME_S_MAX = 1e9
"""Latest time in a trace or of a generator, about 32 years."""
SCALE_MAX = 1e6


class TraceError(ValueError):
    """A trace or a description of load that cannot be used: where, and what was expected."""

    def __init__(self, message: str, file: str = "", line: int | None = None) -> None:
        self.file, self.line, self.message = file, line, message
        place = f"{file}:{line}: " if line is not None else f"{file}: " if file else ""
        super().__init__(place + message)


@dataclass(frozen=True, slots=True)
class Options:
    """What every source understands."""

    scale: float = 1.0
    """Factor of the rate: recorded requests are played that much faster, rate curves are multiplied by it."""
    start_s: float = 0.0
    """Skip what was recorded before this time."""
    duration_s: float | None = None
    """Stop making arrivals after this much simulated time."""
    limit: int | None = None
    """Stop after as many arrivals (conversations and agent tasks count once)."""
    compress: float = 1.0
    """Rate curves only: their time axis is shortened by this factor and the rates stay, a week in an hour."""

    def __post_init__(self) -> None:
        check_number("scale", self.scale, above=0.0, to=SCALE_MAX)
        check_number("compress", self.compress, above=0.0, to=SCALE_MAX)
        check_number("start_s", self.start_s, to=TIME_S_MAX)
        if self.duration_s is not None:
            check_number("duration_s", self.duration_s, above=0.0, to=TIME_S_MAX)
        if self.limit is not None and self.limit < 1:
            raise TraceError(f"limit must be at least 1, is {self.limit}")

    @property
    def end_ns(self) -> float:
        """Arrivals at or after this time are not made."""
        return math.inf if self.duration_s is None else self.duration_s * 1e9


def check_number(
    what: str, value: float, *, at_least: float = 0.0, above: float | None = None, to: float = math.inf
) -> None:
    """Raise :class:`TraceError` unless ``value`` is a number in ``[at_least, to]`` or ``(above, to]``."""
    low = value > above if above is not None else value >= at_least
    if not (low and value <= to):
        bound = f"greater than {above:g}" if above is not None else f"at least {at_least:g}"
        upper = f" and at most {to:,.0f}" if to < math.inf else ""
        raise TraceError(f"{what} must be {bound}{upper}, is {value:g}")


class Table:
    """Rows of a trace in columns; about 40 bytes a row and 8 a block."""

    def __init__(self, name: str, block_tokens: int = 512) -> None:
        self.name = name
        self.block_tokens = block_tokens
        self.arrival_ns = array("q")
        self.prompt_tokens = array("l")
        self.output_tokens = array("l")
        self._blocks = array("Q")
        self._block_ends = array("q")

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def add(
        self, arrival_ns: int, prompt_tokens: int, output_tokens: int, blocks: Sequence[BlockHash], line: int
    ) -> None:
        """Append one row; raises :class:`TraceError` where it is earlier than the row above or the table is full."""
        if self.arrival_ns and arrival_ns < self.arrival_ns[-1]:
            before, now = self.arrival_ns[-1] / 1e9, arrival_ns / 1e9
            raise TraceError(f"time {now:g} s is before the row above ({before:g} s); sort by time", self.name, line)
        if len(self) >= ROWS_MAX:
            raise TraceError(f"more than {ROWS_MAX:,} rows", self.name, line)
        self.arrival_ns.append(arrival_ns)
        self.prompt_tokens.append(prompt_tokens)
        self.output_tokens.append(output_tokens)
        self._blocks.extend(blocks)
        self._block_ends.append(len(self._blocks))

    def blocks(self, row: int) -> tuple[BlockHash, ...]:
        """Chain hashes of the full prompt blocks of ``row``."""
        return tuple(self._blocks[self._block_ends[row - 1] if row else 0 : self._block_ends[row]])

    def finished(self) -> Table:
        """The table, once all is read; raises :class:`TraceError` where it is empty."""
        if not self.arrival_ns:
            raise TraceError("no requests in it", self.name)
        return self


class TraceSource:
    """Plays a table, open loop."""

    def __init__(self, table: Table, options: Options) -> None:
        self.name = table.name
        self._table, self._options = table, options

    def arrivals(self) -> Iterator[SimRequest]:
        """Rows from ``start_s`` on, ``scale`` times as fast."""
        table, options = self._table, self._options
        start_ns, made = round(options.start_s * 1e9), 0
        for row in range(len(table)):
            if table.arrival_ns[row] < start_ns:
                continue
            at_ns = round((table.arrival_ns[row] - start_ns) / options.scale)
            if at_ns >= options.end_ns or made == options.limit:
                return
            yield SimRequest(
                index=made,
                arrival_ns=at_ns,
                prompt_tokens=table.prompt_tokens[row],
                output_tokens=table.output_tokens[row],
                blocks=table.blocks(row),
                block_tokens=table.block_tokens,
            )
            made += 1

    def follow_ups(self, request: SimRequest, succeeded: bool, now_ns: int) -> Sequence[SimRequest]:  # noqa: ARG002
        """None: the trace says when each request came."""
        return ()


def play(table: Table, options: Options | None = None) -> SourceFactory:
    """Factory of sources that play ``table``."""
    options = options or Options()
    if table.arrival_ns[-1] < options.start_s * 1e9:
        last_s = table.arrival_ns[-1] / 1e9
        raise TraceError(f"start_s {options.start_s:g} is after the last request at {last_s:g} s", table.name)
    if options.compress != 1.0:
        raise TraceError("compress is for rate curves; recorded requests are played faster with scale", table.name)
    return lambda _rng: TraceSource(table, options)


# --- rows of text -----------------------------------------------------------------------------------------------------


def csv_rows(
    lines: Iterable[str], name: str, columns: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[int, dict[str, str]]]:
    """Line number and fields of each row of a CSV with a header; fields hold no commas and no quotes.

    Raises :class:`TraceError` on a missing or unknown column and on a row of another length.
    """
    header: list[str] | None = None
    for number, text in enumerate(lines, 1):
        fields = [field.strip() for field in text.lstrip("\ufeff").strip().split(",")]
        if fields == [""]:
            continue
        if header is None:
            header = fields
            _check_columns(header, name, number, columns, optional)
        elif len(fields) != len(header):
            raise TraceError(f"{len(fields)} fields, the header has {len(header)}; cut off?", name, number)
        else:
            yield number, dict(zip(header, fields, strict=True))
    if header is None:
        raise TraceError(f"empty; expected a header with {', '.join(columns)}", name)


def _check_columns(
    header: Sequence[str], name: str, line: int, columns: Sequence[str], optional: Sequence[str]
) -> None:
    missing = [c for c in columns if c not in header]
    unknown = [c for c in header if c not in columns and c not in optional]
    twice = sorted({c for c in header if header.count(c) > 1})
    for what, which in (("column missing", missing), ("unknown column", unknown), ("column twice", twice)):
        if which:
            raise TraceError(f"{what}: {', '.join(which)[:80]}; expected {', '.join(columns)}", name, line)


def json_rows(lines: Iterable[str], name: str) -> Iterator[tuple[int, dict[str, object]]]:
    """Line number and object of each line of JSON; raises :class:`TraceError` on anything else."""
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            what = getattr(error, "msg", "nested too deeply")
            raise TraceError(f"not JSON ({what}); expected one object a line; cut off?", name, number) from None
        if not isinstance(row, dict):
            raise TraceError(f"expected a JSON object, got {type(row).__name__}", name, number)
        yield number, row


def number_of(
    row: Mapping[str, object], key: str, name: str, line: int, *, at_least: float = 0.0, to: float = TIME_S_MAX
) -> float:
    """Field ``key`` as a finite number in ``[at_least, to]``; raises :class:`TraceError` else."""
    value = row.get(key)
    if value is None or isinstance(value, bool):
        raise TraceError(f"{key} is missing; expected a number", name, line)
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise TraceError(f"{key} must be a number, is {str(value)[:40]!r}", name, line) from None
    if not at_least <= number <= to:
        raise TraceError(f"{key} must be in {at_least:g}..{to:,.0f}, is {str(value)[:40]}", name, line)
    return number


def count_of(
    row: Mapping[str, object], key: str, name: str, line: int, *, at_least: int = 0, to: int = TOKENS_MAX
) -> int:
    """Field ``key`` as a whole number in ``[at_least, to]``; raises :class:`TraceError` else."""
    number = number_of(row, key, name, line, at_least=at_least, to=to)
    if number != int(number):
        raise TraceError(f"{key} must be a whole number, is {number:g}", name, line)
    return int(number)


def stream_of(rng: Random) -> int:
    """A seed for streams of the parts of a source, from its own stream."""
    return rng.getrandbits(63)
