"""The control plane from a terminal: commands against a gateway on a socket, and against the ledger's files."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner, Result

from autoscaling.simulator.recorded import DecisionLine
from deployments.cli import cli
from deployments.control_client import ControlError
from deployments.control_commands import seconds_of
from deployments.recording import open_ledger
from deployments.settings import Settings
from policies.steering import Verdict
from policies.types import Decision, Reason
from tests.unit.json_http import JsonHandler, listening

KEY = "tg-0123-secretsecret"


class Gateway(JsonHandler):
    """Answers what the test put into ``answers``; keeps what it was asked."""

    answers: ClassVar[dict[tuple[str, str], tuple[int, Any]]] = {}
    asked: ClassVar[list[tuple[str, str, Any, str | None]]] = []

    def _answer(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.asked.append((self.command, self.path, body, self.headers.get("authorization")))
        status, value = self.answers[self.command, self.path.partition("?")[0]]
        self.send(status, value)

    do_GET = do_POST = do_DELETE = _answer  # noqa: N815  (the base class's names)


@pytest.fixture
def url() -> Iterator[str]:
    Gateway.answers.clear()
    Gateway.asked.clear()
    yield from listening(Gateway)


def run(*args: str, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, list(args), env={"TIDEGATE_API_KEY": "", **(env or {})})


def an_entry(seq: int, **changes: Any) -> dict[str, Any]:
    return {
        "seq": seq, "tick": seq, "lever": "batch", "target": "r1", "before": {"step_tokens_max": 100},
        "after": {"step_tokens_max": 200}, "acted": True, "reason": {"code": "C", "text": "because"}, "inputs": {},
        "predicted": {}, "alternatives": [], "realised": {}, "verdict": "pending", "verdict_text": "",
        "judged_tick": None, "conditions": [], "condition_details": [], "at": "2026-11-30T21:14:05.000Z", "epoch": "e",
        **changes,
    }  # fmt: skip


def test_decisions_are_listed_and_filters_reach_the_gateway(url: str) -> None:
    Gateway.answers["GET", "/control/decisions"] = 200, [an_entry(1), an_entry(2)]
    result = run("decisions", "--url", url, "--lever", "batch", "--since", "15m", "--limit", "7")
    assert result.exit_code == 0
    assert [line[:2] for line in result.stdout.splitlines()] == ["#1", "#2"]
    assert Gateway.asked[0][1] == "/control/decisions?limit=7&lever=batch&since=15m"
    assert json.loads(run("decisions", "--url", url, "--json").stdout) == [an_entry(1), an_entry(2)]


def test_explain_tells_the_last_one_or_the_one_asked_for(url: str) -> None:
    Gateway.answers["GET", "/control/decisions"] = 200, [an_entry(5)]
    assert "Decision #5" in run("explain", "--url", url).stdout
    assert "step_tokens_max 100 -> 200" in run("explain", "5", "--url", url).stdout
    assert Gateway.asked[-1][1] == "/control/decisions?limit=1&since_seq=4"
    gone = run("explain", "4", "--url", url)
    assert gone.exit_code == 1
    assert "there is no decision #4" in gone.stderr
    assert "give the number of a decision" in run("explain", "five", "--url", url).stderr


def test_a_steady_fleet_is_said_to_be_steady(url: str) -> None:
    Gateway.answers["GET", "/control/decisions"] = 200, []
    Gateway.answers["GET", "/control/conditions"] = 200, {"data": []}
    Gateway.answers["GET", "/control/overrides"] = 200, {"data": []}
    assert "no decision was made since 1h" in run("explain", "--since", "1h", "--url", url).stdout
    assert "the fleet was steady" in run("decisions", "--url", url).stdout
    assert "no condition is active" in run("conditions", "--url", url).stdout
    assert "no override is in force" in run("override", "list", "--url", url).stdout


def test_an_override_is_set_and_cleared(url: str, tmp_path: Path) -> None:
    held = {"id": "a1", "knob": "step_tokens_max", "target": "r1", "value": 512, "mode": None, "expires_in_s": 900,
            "by": "k", "why": "drill"}  # fmt: skip
    Gateway.answers["POST", "/control/overrides"] = 200, held
    Gateway.answers["DELETE", "/control/overrides/a1"] = 200, {"data": [held]}
    Gateway.answers["DELETE", "/control/overrides"] = 200, {"data": []}
    key_file = tmp_path / "key"
    key_file.write_text(KEY + "\n", encoding="utf-8")
    options = ("--url", url, "--key-file", str(key_file))
    result = run(
        "override", "set", "step_tokens_max", "512", "--target", "r1", "--for", "15m", "--why", "drill", *options
    )
    assert result.exit_code == 0
    assert "override clear a1" in result.stdout
    body = {"knob": "step_tokens_max", "value": 512, "target": "r1", "expires_in_s": 900, "why": "drill"}
    assert Gateway.asked[-1] == ("POST", "/control/overrides", body, f"Bearer {KEY}")
    assert "taken back: a1" in run("override", "clear", "a1", *options).stdout
    assert "no override was in force" in run("override", "clear", "--all", *options).stdout
    for wrong in ((), ("a1", "--all")):
        assert "give the id of one override" in run("override", "clear", *wrong, *options).stderr


def test_shadow_mode_is_turned_on_and_off(url: str) -> None:
    row = {"knob": "load_bound", "mode": "shadow", "because": "override x", "expires_in_s": 60, "held": []}
    Gateway.answers["POST", "/control/shadow"] = 200, {"data": [row]}
    Gateway.answers["GET", "/control/shadow"] = 200, {"data": [row]}
    assert "SHADOW" in run("shadow", "on", "load_bound", "--for", "1m", "--url", url).stdout
    assert Gateway.asked[-1][2] == {"shadow": True, "knob": "load_bound", "expires_in_s": 60}
    assert run("shadow", "off", "--url", url).exit_code == 0
    assert Gateway.asked[-1][2] == {"shadow": False, "expires_in_s": 3_600}
    assert json.loads(run("shadow", "status", "--json", "--url", url).stdout) == [row]


def test_the_key_comes_from_the_environment_and_what_is_refused_is_one_line_without_it(url: str) -> None:
    error = {"error": {"message": "The API key is not valid.", "type": "authentication_error"}}
    Gateway.answers["GET", "/control/overrides"] = 401, error
    result = run("override", "list", "--url", url, env={"TIDEGATE_API_KEY": KEY})
    assert Gateway.asked[-1][3] == f"Bearer {KEY}"
    assert result.exit_code == 1
    assert "The API key is not valid. Set TIDEGATE_API_KEY" in result.stderr.replace("\n", " ")
    assert KEY not in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "args",
    [
        ("override", "list", "--url", "http://127.0.0.1:9"),  # nobody listens
        ("override", "list", "--url", "file:///etc/passwd"),
        ("override", "list", "--key-file", "/no/such/file"),
        ("override", "set", "load_bound", "1", "--for", "soon"),
        ("decisions", "--follow", "--ledger", "/tmp"),
        ("explain", "--ledger", "/no/such/folder"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_1(args: tuple[str, ...]) -> None:
    result = run(*args)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.output


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("15m", 900), ("1.5h", 5_400), ("2d", 172_800)])
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "m", "5w", "five minutes"])
def test_what_is_no_length_of_time_is_refused(text: str) -> None:
    with pytest.raises(ControlError, match="--for"):
        seconds_of(text)


# --- the ledger on disk -----------------------------------------------------------------------------------------------


def a_decision(seq: int, lever: str = "batch") -> Decision:
    reason = Reason("C", "because")
    return Decision(seq, seq, lever, "r1", {"step_tokens_max": 1}, {"step_tokens_max": 2}, True, reason, {}, at_ns=seq)


def test_the_ledgers_files_tell_the_last_word_of_each_decision(tmp_path: Path) -> None:
    settings = Settings.load({"ledger": {"folder": str(tmp_path)}})
    start_ns = time.time_ns()
    for life, epoch in enumerate(("a" * 32, "b" * 32)):
        ledger = open_ledger(settings, epoch)
        assert ledger is not None
        for seq in (1, 2):
            decision = a_decision(seq, "batch" if seq == 1 else "replicas")
            ledger.put(DecisionLine(start_ns + life * 10_000_000_000 + seq, decision, ()))
        judged = replace(a_decision(1), verdict=Verdict.WORSE, verdict_text="met fell")
        ledger.put(DecisionLine(start_ns + life * 10_000_000_000 + 1, judged, ()))
        ledger.close()
    listed = run("decisions", "--ledger", str(tmp_path), "--json")
    assert listed.exit_code == 0, listed.output
    entries = json.loads(listed.stdout)
    assert [(e["epoch"][0], e["seq"], e["verdict"]) for e in entries] == [
        ("a", 1, "worse"), ("a", 2, "pending"), ("b", 1, "worse"), ("b", 2, "pending"),
    ]  # fmt: skip
    one = run("explain", "1", "--ledger", str(tmp_path))
    assert "Met fell" in one.stdout
    assert "Decision #2" in run("explain", "--ledger", str(tmp_path)).stdout
    only = json.loads(run("decisions", "--ledger", str(tmp_path), "--lever", "replicas", "--json").stdout)
    assert [e["seq"] for e in only] == [2, 2]


def test_a_ledger_that_is_off_or_has_no_folder_writes_nothing(tmp_path: Path) -> None:
    assert open_ledger(Settings.load({"ledger": {"enabled": False}}), "e", str(tmp_path)) is None
    assert open_ledger(Settings.load({}), "e") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "method", "path"),
    [
        (["conditions"], "GET", "/control/conditions"),
        (["override", "list"], "GET", "/control/overrides"),
        (["override", "set", "load_bound", "2"], "POST", "/control/overrides"),
        (["override", "clear", "--all"], "DELETE", "/control/overrides"),
        (["shadow", "status"], "GET", "/control/shadow"),
        (["shadow", "on"], "POST", "/control/shadow"),
        (["shadow", "off"], "POST", "/control/shadow"),
        (["decisions", "--limit", "7"], "GET", "/control/decisions"),
        (["explain"], "GET", "/control/decisions"),
    ],
)
def test_a_command_is_about_the_model_it_names(url: str, command: list[str], method: str, path: str) -> None:
    Gateway.answers[method, path] = 404, {"error": {"message": "no such model"}}
    result = run(*command, "--url", url, "--model", "org/b")
    assert result.exit_code != 0
    asked = Gateway.asked[0][1]
    assert asked.startswith(path)
    assert asked.endswith("model=org%2Fb")
    run(*command, "--url", url)
    assert "model=" not in Gateway.asked[1][1]
