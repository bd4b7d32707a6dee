"""Opening recorded traffic: formats are recognised, damaged files are named, real traces count what they should."""

from __future__ import annotations

import gzip
import statistics
from pathlib import Path
from random import Random

import pytest

from autoscaling.simulator.spec import SimRequest, SourceFactory
from autoscaling.simulator.workload.lengths import Fixed, parse_quantiles
from autoscaling.simulator.workload.trace import Options, TraceError
from deployments.simulation.files import FORMATS, detect_format, open_trace, parse_lengths, read_lines
from tests.data import data_file
from tests.unit.simulator.test_workload_traces import (
    AZURE,
    CLIENTS,
    EXGENTIC,
    MOONCAKE,
    QUANTILES,
    RATES,
    TRACELAB,
    WEEK,
)

LINES = {
    "mooncake": MOONCAKE, "azure": AZURE, "azure-week": WEEK, "servegen-rates": RATES, "servegen-clients": CLIENTS,
    "tracelab": TRACELAB, "exgentic": EXGENTIC,
}  # fmt: skip


def drawn(factory: SourceFactory) -> list[SimRequest]:
    return list(factory(Random("1")).arrivals())


def write(path: Path, lines: list[str]) -> Path:
    text = "\n".join(lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_every_format_is_recognised_packed_or_not(tmp_path: Path, name: str, suffix: str) -> None:
    path = write(tmp_path / f"trace{suffix}", LINES[name])
    assert detect_format(path) == name
    assert drawn(open_trace(path, lengths=Fixed(10, 10)))
    assert drawn(open_trace(path, name, Options(limit=1), lengths=Fixed(10, 10)))


def test_all_formats_are_tested() -> None:
    assert set(FORMATS) == set(LINES)


def test_a_format_that_lacks_a_column_is_still_recognised_and_the_column_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"trace:1: column missing: GeneratedTokens"):
        open_trace(write(tmp_path / "trace", ["TIMESTAMP,ContextTokens", "x,1"]))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([], "trace: empty; expected one of mooncake, azure"),
        (["", "   "], "trace: empty"),
        (["a,b,c"], "trace:1: format not recognised from 'a, b, c'; known: mooncake, azure"),
        (['{"prompt": 1}'], "trace:1: format not recognised from 'prompt'"),
        (['{"timestamp": 1'], "trace:1: format not recognised"),
        (["[" * 50_000], "trace:1: format not recognised"),
    ],
)
def test_what_is_no_trace_is_named(tmp_path: Path, lines: list[str], expected: str) -> None:
    path = tmp_path / "trace"
    path.write_text("\n".join(lines))
    with pytest.raises(TraceError) as caught:
        open_trace(path)
    assert str(caught.value).removeprefix(f"{tmp_path}/").startswith(expected)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    packed = write(tmp_path / "whole.gz", MOONCAKE * 200)
    cut = tmp_path / "cut.gz"
    cut.write_bytes(packed.read_bytes()[:-20])
    garbage = tmp_path / "garbage.gz"
    garbage.write_bytes(b"\x1f\x8b" + bytes(range(200)))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path, expected in (
        (tmp_path / "absent", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (cut, "damaged or cut off"),
        (garbage, "damaged or cut off"),
        (binary, "not UTF-8"),
    ):
        with pytest.raises(TraceError, match=expected) as caught:
            list(read_lines(path))
        assert str(caught.value).startswith(str(path))


def test_a_trace_cut_off_in_the_middle_of_a_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("\n".join(MOONCAKE)[:-30])
    with pytest.raises(TraceError, match=r"trace:3: not JSON .*cut off\?"):
        open_trace(path)


def test_unknown_format_and_missing_lengths_are_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="format 'mooncacke' is unknown; known: auto, mooncake"):
        open_trace(write(tmp_path / "a", MOONCAKE), "mooncacke")
    for lines in (WEEK, RATES, CLIENTS):
        with pytest.raises(TraceError, match=r"has rates only.*give lengths"):
            open_trace(write(tmp_path / "b", lines))


def test_lengths_as_people_write_them(tmp_path: Path) -> None:
    assert parse_lengths("3000,300") == Fixed(3000, 300)
    table = write(tmp_path / "q.csv", QUANTILES)
    assert parse_lengths(f"{table}:a/b") == parse_quantiles(QUANTILES, "q")["a/b"]
    with pytest.raises(TraceError, match="no lengths of both sides for 'a/c'; there are: a/b"):
        parse_lengths(f"{table}:a/c")
    with pytest.raises(TraceError, match="expected PROMPT,OUTPUT"):
        parse_lengths("3000")
    with pytest.raises(TraceError, match="prompt_tokens must be at least 1"):
        parse_lengths("0,5")


# --- real traces: figures of the data's own description ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rows", "length_s", "prompt_mean", "output_mean", "hit_share", "blocks"),
    [
        ("mooncake_conversation.jsonl.gz", 12_031, 3_537, 12_035, 343, 0.382, 276_491),
        ("mooncake_synthetic.jsonl.gz", 3_993, 1_022, 15_325, 149, 0.659, 117_888),
    ],
)
def test_mooncake(
    name: str, rows: int, length_s: float, prompt_mean: float, output_mean: float, hit_share: float, blocks: int
) -> None:
    requests = drawn(open_trace(data_file(f"traces/{name}")))
    assert len(requests) == rows
    assert requests[-1].arrival_ns / 1e9 == pytest.approx(length_s, abs=1)
    assert statistics.mean(r.prompt_tokens for r in requests) == pytest.approx(prompt_mean, abs=1)
    assert statistics.mean(r.output_tokens for r in requests) == pytest.approx(output_mean, abs=1)
    seen: set[int] = set()
    hits = 0
    for request in requests:
        hits += sum(block in seen for block in request.blocks)
        seen.update(request.blocks)
    assert sum(len(r.blocks) for r in requests) == blocks  # full ones; all together there are 288,500 and 121,877
    assert hits / blocks == pytest.approx(hit_share, abs=0.001)


def test_azure_code() -> None:
    requests = drawn(open_trace(data_file("traces/azure_llm_2023_code.csv.gz")))
    assert len(requests) == 8_819
    assert requests[-1].arrival_ns / 1e9 == pytest.approx(3_436, abs=1)
    assert statistics.mean(r.prompt_tokens for r in requests) == pytest.approx(2_048, abs=1)
    assert statistics.mean(r.output_tokens for r in requests) == pytest.approx(28, abs=0.5)


@pytest.mark.parametrize(
    ("name", "scale", "expected"),
    [
        ("azure2024_code_week_rpm_digitised.csv", 2e-4, 3_361),
        ("servegen_reason_deepseek-r1_rate_600s.csv.gz", 0.002, 2_767),
        ("servegen_deepseek-r1_perclient.csv.gz", 0.002, 2_767),
        ("servegen_language_m-large_rate_600s.csv.gz", 1e-5, 2_370),
    ],
)
def test_rates_add_up_to_the_published_totals(name: str, scale: float, expected: int) -> None:
    requests = drawn(open_trace(data_file(f"traces/{name}"), options=Options(scale=scale)))
    assert len(requests) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    ("category", "prompt_mean", "output_mean"), [("language/m-large", 914.3, 155.1), ("reason/deepseek-r1", 1268, 1527)]
)
def test_quantiles_have_the_recorded_means(category: str, prompt_mean: float, output_mean: float) -> None:
    path = data_file("traces/servegen_length_quantiles.csv")
    lengths, rng = parse_lengths(f"{path}:{category}"), Random("1")
    pairs = [lengths.draw(rng) for _ in range(5_000)]
    assert statistics.mean(p for p, _ in pairs) == pytest.approx(prompt_mean, rel=0.1)
    assert statistics.mean(o for _, o in pairs) == pytest.approx(output_mean, rel=0.1)


@pytest.mark.parametrize(
    ("name", "sessions"), [("tracelab_example_rounds.jsonl", 2), ("exgentic_agent_calls_lengths.csv", 18)]
)
def test_agent_sessions_as_many_as_were_recorded(name: str, sessions: int) -> None:
    assert len({r.task for r in drawn(open_trace(data_file(f"traces/{name}")))}) == sessions
