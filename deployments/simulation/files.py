"""Opens recorded traffic: plain or gzip, detects the format from the first line, hands lines to the pure parsers.

Everything that can be wrong with a file ends as one :class:`TraceError` with file, line and what was expected.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from autoscaling.simulator.spec import SourceFactory
from autoscaling.simulator.workload.agents import (
    EXGENTIC_COLUMNS,
    TRACELAB_KEYS,
    RecordedSession,
    parse_exgentic,
    parse_tracelab,
    replay_sessions,
)
from autoscaling.simulator.workload.azure import COLUMNS_2023, COLUMNS_2024, parse_azure, parse_azure_week
from autoscaling.simulator.workload.generators import from_curve
from autoscaling.simulator.workload.lengths import Empirical, Fixed, Lengths, parse_quantiles
from autoscaling.simulator.workload.mooncake import KEYS, parse_mooncake, spread_ties
from autoscaling.simulator.workload.servegen import (
    CLIENT_COLUMNS,
    RATE_COLUMNS,
    category_of,
    from_clients,
    parse_servegen_clients,
    parse_servegen_rates,
)
from autoscaling.simulator.workload.trace import Options, TraceError, play

LINE_CHARS_MAX = 64 * 1024 * 1024
"""Longest line of a trace."""
_QUANTILES = "servegen_length_quantiles.csv"


def read_lines(path: Path) -> Iterator[str]:
    """Lines of a text file, gzip or not; raises :class:`TraceError` where it cannot be read to its end."""
    line = 0
    if path.is_fifo():
        raise TraceError("is a pipe; it is read more than once and must be a file", str(path))
    try:
        with path.open("rb") as probe:
            packed = probe.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rt", encoding="utf-8-sig") if packed else path.open(encoding="utf-8-sig") as file:
            while text := file.readline(LINE_CHARS_MAX):
                line += 1
                if len(text) == LINE_CHARS_MAX:
                    raise TraceError(f"longer than {LINE_CHARS_MAX:,} characters", str(path), line)
                yield text
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise TraceError(f"gzip data is damaged or cut off ({error})", str(path), line + 1) from None
    except UnicodeDecodeError:
        raise TraceError("not UTF-8 text", str(path), line + 1) from None
    except OSError as error:
        raise TraceError(f"cannot be read: {error.strerror or error}", str(path)) from None


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the caller asked for beside the file."""

    path: Path
    options: Options
    lengths: Lengths | None
    cv: float
    spread: bool
    session_rate_per_s: float
    pause_s_mean: float


def open_trace(
    path: str | Path,
    format: str = "auto",  # noqa: A002
    options: Options | None = None,
    *,
    lengths: Lengths | None = None,
    cv: float = 1.0,
    spread: bool = False,
    session_rate_per_s: float = 1.0,
    pause_s_mean: float = 2.0,
) -> SourceFactory:
    """Source of the requests in ``path``, checked whole; raises :class:`TraceError`.

    Args:
        path: File, plain or gzip.
        format: One of :data:`FORMATS`, or ``auto``.
        options: Scale, start, duration, limit.
        lengths: For traces that have rates only; by default what lies beside the file.
        cv: For traces that have rates only: coefficient of variation of the gaps.
        spread: Requests with one time (Mooncake rounds to 3 s) are spread up to the next time.
        session_rate_per_s: For recorded sessions of agents: how many begin.
        pause_s_mean: For recorded sessions whose pauses were not recorded.
    """
    wanted = _Wanted(Path(path), options or Options(), lengths, cv, spread, session_rate_per_s, pause_s_mean)
    name = detect_format(wanted.path) if format == "auto" else format
    if name not in FORMATS:
        raise TraceError(f"format {name!r} is unknown; known: auto, {', '.join(FORMATS)}")
    return FORMATS[name](wanted)


def detect_format(path: Path) -> str:
    """Name of the format of ``path``, by its first line that is not blank; raises :class:`TraceError`."""
    first = next((text for text in read_lines(path) if text.strip()), None)
    if first is None:
        raise TraceError(f"empty; expected one of {', '.join(FORMATS)}", str(path))
    names = _names_of(first)
    best = max(_SIGNS, key=lambda format_name: len(names & set(_SIGNS[format_name])))
    if len(names & set(_SIGNS[best])) * 2 <= len(_SIGNS[best]):
        looks = ", ".join(sorted(names))[:80] or first.strip()[:40]
        raise TraceError(f"format not recognised from {looks!r}; known: {', '.join(FORMATS)}", str(path), 1)
    return best


def _names_of(first: str) -> set[str]:
    """Column names or keys in the first line of a trace."""
    if first.lstrip().startswith("{"):
        try:
            return set(json.loads(first))
        except (ValueError, RecursionError):
            return set()
    return {field.strip() for field in first.lstrip("\ufeff").strip().split(",")}


# --- lengths ----------------------------------------------------------------------------------------------------------


def parse_lengths(text: str) -> Lengths:
    """Lengths as people write them: ``3000,300``, or ``FILE:CATEGORY`` of a table; raises :class:`TraceError`."""
    prompt, comma, output = text.partition(",")
    if comma and prompt.strip().isdigit() and output.strip().isdigit():
        return Fixed(int(prompt), int(output))
    file, colon, category = text.rpartition(":")
    if not colon:
        raise TraceError(f"lengths {text[:40]!r}: expected PROMPT,OUTPUT in tokens or FILE:CATEGORY")
    return _quantiles(Path(file), category)


def _quantiles(path: Path, category: str) -> Lengths:
    table = parse_quantiles(read_lines(path), str(path))
    if category not in table:
        raise TraceError(f"no lengths of both sides for {category!r}; there are: {', '.join(sorted(table))}", str(path))
    return table[category]


# --- formats ----------------------------------------------------------------------------------------------------------


def _mooncake(wanted: _Wanted) -> SourceFactory:
    table = parse_mooncake(read_lines(wanted.path), str(wanted.path))
    return play(spread_ties(table) if wanted.spread else table, wanted.options)


def _azure(wanted: _Wanted) -> SourceFactory:
    table = parse_azure(read_lines(wanted.path), str(wanted.path))
    return play(spread_ties(table) if wanted.spread else table, wanted.options)


def _azure_week(wanted: _Wanted) -> SourceFactory:
    curve = parse_azure_week(read_lines(wanted.path), str(wanted.path))
    lengths = wanted.lengths or _azure_lengths(wanted.path)
    return from_curve(curve, lengths, wanted.options, cv=wanted.cv)


def _azure_lengths(path: Path) -> Lengths:
    """Pairs of the 2023 trace of the same kind, where it lies beside the week."""
    kind = "code" if "code" in path.name else "conv"
    for beside in (path.parent / f"azure_llm_2023_{kind}.csv.gz", path.parent / f"azure_llm_2023_{kind}.csv"):
        if beside.is_file():
            table = parse_azure(read_lines(beside), str(beside))
            return Empirical(list(zip(table.prompt_tokens, table.output_tokens, strict=True)))
    raise TraceError(f"has rates only and no azure_llm_2023_{kind}.csv.gz lies beside it: give lengths", str(path))


def _servegen_lengths(wanted: _Wanted) -> Lengths:
    """Quantiles of the same model, where their table lies beside the rates."""
    if wanted.lengths is not None:
        return wanted.lengths
    category, table = category_of(wanted.path.name), wanted.path.parent / _QUANTILES
    if category is None or not table.is_file():
        raise TraceError(f"has rates only and no {_QUANTILES} names its lengths: give lengths", str(wanted.path))
    return _quantiles(table, category)


def _servegen_rates(wanted: _Wanted) -> SourceFactory:
    curve = parse_servegen_rates(read_lines(wanted.path), str(wanted.path))
    return from_curve(curve, _servegen_lengths(wanted), wanted.options, cv=wanted.cv)


def _servegen_clients(wanted: _Wanted) -> SourceFactory:
    name = str(wanted.path)
    clients = parse_servegen_clients(read_lines(wanted.path), name)
    return from_clients(clients, name, _servegen_lengths(wanted), wanted.options)


def _sessions(parse: Callable[[Iterable[str], str], list[RecordedSession]]) -> Callable[[_Wanted], SourceFactory]:
    def load(wanted: _Wanted) -> SourceFactory:
        name = str(wanted.path)
        recorded = parse(read_lines(wanted.path), name)
        rate_per_s, pause_s = wanted.session_rate_per_s, wanted.pause_s_mean
        return replay_sessions(recorded, wanted.path.name, rate_per_s, wanted.options, pause_s_mean=pause_s)

    return load


FORMATS: dict[str, Callable[[_Wanted], SourceFactory]] = {
    "mooncake": _mooncake,
    "azure": _azure,
    "azure-week": _azure_week,
    "servegen-rates": _servegen_rates,
    "servegen-clients": _servegen_clients,
    "tracelab": _sessions(parse_tracelab),
    "exgentic": _sessions(parse_exgentic),
}
"""Loader of each format."""

RATES_ONLY = ("azure-week", "servegen-rates", "servegen-clients")
"""Formats without lengths."""

_SIGNS: dict[str, tuple[str, ...]] = {
    "mooncake": KEYS,
    "azure": COLUMNS_2023,
    "azure-week": COLUMNS_2024,
    "servegen-rates": RATE_COLUMNS,
    "servegen-clients": CLIENT_COLUMNS,
    "tracelab": TRACELAB_KEYS,
    "exgentic": EXGENTIC_COLUMNS,
}
"""Columns or keys by which a format is recognised: most of them must be there, the parser names what is wrong."""
