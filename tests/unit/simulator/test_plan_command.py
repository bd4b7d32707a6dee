"""``plan`` as people call it: a plan in words and JSON, what is impossible, and one line for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deployments.cli import cli
from deployments.simulation import plots, running

LOAD = "poisson:rate=6,prompt=500,output=20,duration=8"
H100 = ["--profile", "h100-llama-3.1-8b-bf16"]


def plan(*args: object) -> Result:
    return CliRunner().invoke(cli, ["plan", *map(str, args)])


def refused(result: Result) -> str:
    assert result.exit_code == 2, result.output + result.stderr
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if "error:" in line]
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.slow
def test_a_plan_is_told_in_words_with_margins_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "save_run_plots", lambda folder, arms, objectives: [])  # test_sim_command draws those
    result = plan(LOAD, *H100, "--static", "--no-split", "--out", tmp_path)
    assert result.exit_code == 0, result.stderr
    for words in (
        "1 x h100-llama-3.1-8b-bf16, static",
        "$3.85/h",
        "of the limit is left",
        "next cheaper",
        "takes",
        "kept",
    ):
        assert words in result.stdout, words
    assert "none holds yet" in result.stderr, "what is tried is shown"
    assert json.loads((tmp_path / "plan.json").read_text())["best"]["replicas"] == 1
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_prices_decide_between_kinds() -> None:
    kinds = [
        "--gpu",
        "H100",
        "--gpu",
        "L40S",
        "--profile",
        "h100-llama-3.1-8b-bf16",
        "--profile",
        "l40s-llama-3.1-8b-bf16",
    ]
    common = [LOAD, *kinds, "--static", "--no-split", "--json"]
    listed = json.loads(plan(*common).stdout)
    turned = json.loads(plan(*common, "--price", "H100=0.5", "--price", "L40S=5").stdout)
    assert listed["best"]["gpu"] == "L40S"
    assert turned["best"]["gpu"] == "H100"
    assert turned["best"]["usd_per_hour"] == 0.5
    assert turned["complete"] is True


@pytest.mark.parametrize(
    ("objectives", "words"),
    [(["--ttft-ms", 5], "closest: TTFT of"), (["--itl-ms", 1], "closest: ITL of")],
)
def test_the_impossible_is_said_at_once_with_what_is_not(objectives: list[object], words: str) -> None:
    result = plan(LOAD, *H100, *objectives)
    assert result.exit_code == 1
    assert "impossible: no number of these replicas holds the objectives" in result.stdout
    assert words in result.stdout
    assert "simulation 1" not in result.stderr, "nothing was simulated"
    content = json.loads(plan(LOAD, *H100, *objectives, "--json").stdout)
    assert content["impossible"] is True
    assert content["best"] is None
    assert content["simulations"] == 0


def test_ctrl_c_says_that_the_plan_is_not_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.Stop, "__call__", lambda _self: True)
    result = plan(LOAD, *H100)
    assert result.exit_code == 130
    assert "not complete: ended by the user" in result.stdout


def test_ctrl_c_ends_the_reading_of_a_long_load_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running.Stop, "__call__", lambda _self: True)
    result = plan("poisson:rate=1000,prompt=5,output=5,duration=4000", *H100)
    assert result.exit_code == 130
    assert result.stderr.splitlines()[-1] == "ended"
    assert "simulation 1" not in result.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([LOAD, "--price", "H100=0"], "must be above 0"),
        ([LOAD, "--price", "B200=4"], "no profile here uses it"),
        ([LOAD, "--model", "Llama-3.1-9B"], "did you mean Llama-3.1-8B?"),
        ([LOAD, "--gpu", "H10"], "did you mean H100?"),
        ([LOAD, "--profile", "h100"], "no such profile"),
        ([LOAD, *H100, *H100], "is given twice"),
        ([LOAD, "--attainment", "1.5"], "attainment must be above 0 and at most 1"),
        ([LOAD, "--ttft-ms", "0"], "must be above 0"),
        (["poisson:rate=0.001,prompt=5,output=5,duration=1"], "the load has no request"),
        (["none.jsonl"], "no such file"),
    ],
)
def test_what_cannot_be_is_one_line(args: list[str], words: str) -> None:
    assert words in refused(plan(*args))
