"""``sim`` as people call it: what it prints and writes, and one clear line for each thing that can be wrong."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deployments.cli import cli
from deployments.simulation import running

LOAD = "poisson:rate=4,prompt=200,output=20,duration=8"
SMALL = ["--profile", "h100-llama-3.1-8b-bf16"]
ROWS = [
    {"timestamp": t, "input_length": 600, "output_length": 8, "hash_ids": [1, t]} for t in (0, 300, 300, 900)
]  # fmt: skip


def sim(*args: object) -> Result:
    return CliRunner().invoke(cli, ["sim", *map(str, args)])


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output + result.stderr
    assert "Traceback" not in result.output + result.stderr
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, lines
    return lines[0]


def trace(folder: Path, *rows: object, name: str = "t.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# --- what works -------------------------------------------------------------------------------------------------------


def test_a_generated_load_is_simulated_and_told_in_words() -> None:
    result = sim(LOAD)
    assert result.exit_code == 0, result.stderr
    for words in ("objectives kept", "TTFT (ms)", "TPOT (ms)", "GPU-hours", "successful tasks", "100.0 %"):
        assert words in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 240
    assert "\x1b" not in result.stdout, "a pipe gets no colours"


def test_json_is_all_that_a_pipe_gets_and_runs_repeat() -> None:
    first, second = (json.loads(sim(LOAD, "--json", "--seed", 3).stdout) for _ in range(2))
    assert first == second
    assert first["runs"][0]["attainment_share"] == 1.0
    assert first["runs"][0]["seed"] == 3
    assert first["runs"][0]["refused"] == 0
    assert first["interrupted"] is False


def test_a_trace_is_played_faster_by_scale(tmp_path: Path) -> None:
    path = trace(tmp_path, *ROWS)
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    plain, quick = (json.loads(sim(*args, "--json").stdout)["runs"][0] for args in ((path,), (packed, "--scale", 3)))
    assert plain["requests"] == quick["requests"] == 4
    assert quick["span_s"] < plain["span_s"]


@pytest.mark.slow
def test_arms_and_seeds_are_compared_with_pictures(tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    result = sim(LOAD, "--replicas", 2, "--compare", "tidegate,round_robin", "--seed", 1, "--seed", 2, "--out", out)
    assert result.exit_code == 0, result.stderr
    assert "median (lowest..highest) of 2 seeds; x: ratio to tidegate" in result.stdout
    assert "round_robin" in result.stdout
    content = json.loads((out / "report.json").read_text())
    assert [arm["name"] for arm in content["comparison"]] == ["tidegate", "round_robin"]
    assert content["comparison"][0]["ratios"]["goodput_ps"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert len(content["runs"]) == 4
    for name in ("load_and_replicas", "ttft_over_time", "distributions", "comparison"):
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_settings_prices_and_objectives_are_heeded() -> None:
    result = sim(
        LOAD, "--price", "h100=36", "--ttft-ms", 0.001, "--set", "admission.inflight_requests_max=1", "--json"
    )  # fmt: skip
    run = json.loads(result.stdout)["runs"][0]
    assert run["attainment_share"] == 0.0
    assert run["refused"] > 0
    assert run["usd"] == pytest.approx(36 * run["gpu_hours"])


def test_the_live_configuration_is_taken(tmp_path: Path) -> None:
    config = Path(__file__).parents[3] / "serve_config.yaml"
    result = sim(LOAD, "--config", config, "--json")
    content = json.loads(result.stdout)
    assert content["runs"][0]["objectives"] == {"ttft_ms": 2000.0, "itl_ms": 200.0, "quantile": 0.95}
    assert content["fleet"].startswith("1..2 x ")


def test_faults_and_a_divided_fleet_run() -> None:
    result = sim(LOAD, "--replicas", 2, "--fault", "kill@3", "--client-retries", 2, "--json")
    assert json.loads(result.stdout)["runs"][0]["counters"]["kills"] == 1
    divided = json.loads(sim(LOAD, "--split", "1:1", "--json").stdout)["runs"][0]
    assert [pool["role"] for pool in divided["pools"]] == ["prefill", "decode"]


def test_ctrl_c_prints_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([False, False])
    monkeypatch.setattr(running.Stop, "__call__", lambda self: not next(calls, False) and self.ask(2, None) is None)
    result = sim("poisson:rate=50,prompt=200,output=20,duration=60")
    assert result.exit_code == 130
    assert "cut short by Ctrl-C" in result.stdout
    assert "lost" in result.stdout


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([ROWS[0], '{"timestamp": 5, "input_len'], ":2: not JSON"),
        ([ROWS[3], ROWS[0]], ":2: time 0 s is before the row above"),
        ([ROWS[0] | {"input_length": -4}], ":1: input_length must be in"),
        ([ROWS[0] | {"timestamp": -4}], ":1: timestamp must be in"),
        ([{"when": 1}], ":1: format not recognised"),
        (["TIMESTAMP,ContextTokens,Tokens\n2023-11-16 18:17:03,10,5\n"], ":1: column missing: GeneratedTokens"),
        ([], "empty"),
        (["\n\n"], "empty"),
    ],
)
def test_a_bad_trace_is_told_with_file_and_line(tmp_path: Path, rows: list[object], words: str) -> None:
    path = trace(tmp_path, *rows)
    line = refused(sim(path))
    assert str(path) in line
    assert words in line


def test_a_byte_order_mark_is_no_reason_to_refuse(tmp_path: Path) -> None:
    assert sim(trace(tmp_path, "\ufeff" + json.dumps(ROWS[0]) + "\n")).exit_code == 0


def test_a_pipe_is_no_trace_and_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "is a pipe" in refused(sim(tmp_path / "pipe"))


def test_lengths_for_a_trace_that_has_its_own_are_not_dropped_without_a_word(tmp_path: Path) -> None:
    assert "mooncake has its own" in refused(sim(trace(tmp_path, *ROWS), "--lengths", "5,5"))


def test_a_trace_that_is_cut_off_in_its_packing_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(trace(tmp_path, *[ROWS[0]] * 200).read_bytes())[:-20])
    assert "damaged or cut off" in refused(sim(path))


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nothing.jsonl"], "no such file"),
        (["poison:rate=1"], "did you mean poisson?"),
        (["poisson:rate=1,prompt=5"], "output missing"),
        (["poisson:rate=1,prompt=5,output=5"], "never ends; give duration or limit"),
        (["poisson:rate=1,prompts=5,output=5,duration=1"], "unknown key 'prompts'; did you mean prompt?"),
        (["poisson:rate=0,prompt=5,output=5,duration=1"], "rate must be above 0"),
        (["poisson:rate=nan,prompt=5,output=5,duration=1"], "rate must be above 0"),
        (["poisson:rate=1,prompt=0,output=5,duration=1"], "prompt_tokens must be at least 1"),
        (["sinusoid:low=9,high=5,period=60,prompt=5,output=5,duration=9"], "must not be above high"),
        ([LOAD, "--profile", "h100-lama-3.1-8b-bf16"], "did you mean h100-llama-3.1-8b-bf16?"),
        ([LOAD, "--set", "scaling.replica_max=3"], "did you mean 'replicas_max'?"),
        ([LOAD, "--set", "scaling.headroom=2"], "headroom"),
        ([LOAD, "--set", "headroom=0.5"], "it belongs at 'scaling.headroom'"),
        ([LOAD, "--set", "scaling.headroom"], "expected section.key=value"),
        ([LOAD, "--ttft-ms", "-1"], "objectives.ttft_ms: -1.0: must be above 0"),
        ([LOAD, "--ttft-ms", "nan"], "objectives.ttft_ms"),
        ([LOAD, "--quantile", "1"], "objectives.quantile"),
        ([LOAD, "--price", "H100=0"], "must be above 0, is 0"),
        ([LOAD, "--price", "H100=-2"], "must be above 0, is -2"),
        ([LOAD, "--price", "H20=2"], "did you mean H100?"),
        ([LOAD, "--price", "2.5"], "expected GPU=dollars"),
        ([LOAD, "--compare", "tidegate,roundrobin"], "did you mean round_robin?"),
        ([LOAD, "--compare", "random+round_robin"], "are both routers"),
        ([LOAD, "--router", "round_robn"], "did you mean round_robin?"),
        ([LOAD, "--router", "hpa"], "--router 'hpa' is unknown"),
        ([LOAD, "--scaler", "round_robin", "--min", "1", "--max", "3"], "--scaler 'round_robin' is unknown"),
        ([LOAD, "--compare", "tidegate,hpa"], "hpa: the number of replicas is fixed"),
        ([""], "a load is missing"),
        (["poisson:rate=1e6,prompt=5,output=5,duration=600"], "makes about 600,000,000 requests"),
        (["poisson:rate=1,prompt=-5,output=5,duration=1"], "prompt must be at least 0"),
        ([LOAD, "--format", "azure"], "--format: is for traces"),
        ([LOAD, "--lengths", "5,5"], "--lengths: is for traces"),
        ([LOAD, "--profile", "/dev/zero"], "is a device or a pipe"),
        ([LOAD, "--scaler", "hpa"], "give --min and --max"),
        ([LOAD, "--min", "3", "--max", "2"], "must not be above --max"),
        ([LOAD, "--replicas", "0"], "--replicas must be in"),
        ([LOAD, "--split", "2"], "expected PREFILL:DECODE"),
        ([LOAD, "--split", "0:2"], "must be at least 1"),
        ([LOAD, "--split", "1000000:1"], "at most 100,000"),
        ([LOAD, "--split", "a:b"], "--split a:b: prefill"),
        ([LOAD, "--split", "2:9", "--min", "1", "--max", "4"], "must be between --min (1) and --max (4)"),
        ([LOAD, "--fault", "kil@3"], "did you mean kill?"),
        ([LOAD, "--fault", "kill"], "expected KIND@SECONDS"),
        ([LOAD, "--fault", "freeze@3"], "without for it does nothing; write freeze@3:for=60"),
        ([LOAD, "--fault", "slow@3:for=4"], "without factor it does nothing"),
        ([LOAD, "--fault", "kill@3:replica=1"], "replica must be at least 0 and at most 0"),
        ([LOAD, "--seed", "1", "--seed", "1"], "the same seed twice"),
        ([LOAD, "--scale", "0"], "scale must be greater than 0"),
        ([LOAD, "--duration", "-1"], "duration_s must be greater than 0"),
        ([LOAD, "--config", "absent.yaml"], "absent.yaml: cannot be read"),
        ([LOAD, "--out", "/proc/none"], "--out /proc/none"),
        ([LOAD, "--out", ""], "--out: expected a folder"),
    ],
)
def test_what_cannot_be_is_one_line(args: list[str], words: str) -> None:
    assert words in refused(sim(*args))
