"""Every command of ``tidegate``: its help, ``--json``, exit codes, and one line with the next step where it fails."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import typer
from typer.testing import CliRunner, Result

from deployments import bench_commands, launch
from deployments.cli import EXIT_CODES, cli
from deployments.tenant_desk import TenantDesk
from policies.config import PolicyConfig, TenantConfig
from tests.unit.json_http import JsonHandler, listening

ROOT = Path(__file__).resolve().parents[2]
ABSENT = "http://127.0.0.1:1"
NOT_JSON = {
    "up": "stays in the foreground and tells its steps; `status --json` says what runs",
    "fit": "prints the profile, which is JSON, and its words on standard error",
}
"""Commands without ``--json``, and why."""
GIVEN = {
    "request": ["tg-1"],
    "tenants show": ["acme"],
    "override set": ["load_bound", "2"],
    "override clear": ["a1"],
}
"""Arguments that commands which ask a gateway cannot do without."""
NOWHERE = {
    "up": ["--config", "/no/file.yaml"],
    "doctor": ["--config", "/no/file.yaml"],
    "reload": ["--dashboard-port", "1"],
    "model": ["gpt-9"],
    "bench": ["no_such_bench"],
    "sim": ["/no/trace.csv", "--replicas", "1"],
    "plan": ["/no/trace.csv", "--ttft-ms", "1000", "--itl-ms", "50"],
    "replay": ["/no/folder"],
    "fit": ["/no/steps.jsonl", "--like", "h100-llama-3.1-8b-bf16"],
    "keys create": ["--file", "/proc/no/keys.jsonl"],
    "keys list": ["--file", "/proc/no/keys.jsonl"],
    "keys revoke": ["k1", "--file", "/proc/no/keys.jsonl"],
    "keys rotate": ["k1", "--file", "/proc/no/keys.jsonl"],
    "dashboards publish": ["--url", ABSENT, "--folder", "/no/folder"],
    "dashboards export": ["--folder", "/proc/no"],
    "dashboards check": ["--folder", "/no/folder", "--prometheus", ABSENT],
    "dashboards targets": ["--haproxy-config", "/no/haproxy.cfg"],
}
"""Arguments that make a command without a gateway fail."""


def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    found: Mapping[str, Any] | None = getattr(command, "commands", None)
    if found is None:
        yield " ".join(words), command
        return
    for name, child in found.items():
        yield from leaves(child, (*words, name))


COMMANDS = dict(leaves(typer.main.get_command(cli)))
ASKING = [name for name, command in COMMANDS.items() if any("--url" in p.opts for p in command.params)]
LOCAL = [name for name in COMMANDS if name not in ASKING or name in NOWHERE]


def run(*words: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, list(words), env={"TIDEGATE_API_KEY": "", "COLUMNS": "200", **environment})


def test_there_are_all_commands() -> None:
    tops = {name.partition(" ")[0] for name in COMMANDS}
    wanted = "up down status explain decisions override shadow keys tenants plan sim replay bench dashboards doctor"
    assert set(wanted.split()) <= tops


@pytest.mark.parametrize("name", COMMANDS)
def test_help_says_what_a_command_does_and_its_exit_codes(name: str) -> None:
    result = run(*name.split(), "--help")
    assert result.exit_code == 0
    assert (COMMANDS[name].help or "").strip()
    assert "Exit codes: 0 done" in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_prints_json_or_there_is_a_reason(name: str) -> None:
    takes = any("--json" in parameter.opts for parameter in COMMANDS[name].params)
    assert takes is not (name in NOT_JSON)


@pytest.mark.parametrize("name", [name for name in ASKING if name != "dashboards publish"])
def test_without_a_gateway_a_command_fails_in_one_line_with_the_next_step(name: str) -> None:
    result = run(*name.split(), *GIVEN.get(name, []), "--url", ABSENT)
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [
        f"error: {ABSENT} cannot be asked: [Errno 111] Connection refused; is Tidegate up? (--url)"
    ]
    assert result.stdout == ""


@pytest.mark.parametrize("name", [name for name in LOCAL if name != "down"])
def test_what_cannot_be_done_is_told_in_one_line(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "RUN_FOLDER", tmp_path)
    result = run(*name.split(), *NOWHERE[name])
    assert result.exit_code == (2 if name in {"sim", "plan", "replay", "fit", "bench"} else 1), result.output
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, result.output
    assert "Traceback" not in result.output
    assert "unexpected" not in result.output


def test_ending_nothing_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "RUN_FOLDER", tmp_path)
    assert json.loads(run("down", "--json").stdout) == {"ended": False}


# --- answers of a gateway ---------------------------------------------------------------------------------------------


class Gateway(JsonHandler):
    """Gives ``answer`` to whatever is asked."""

    answer: ClassVar[tuple[int, Any]] = (200, {})

    def _any(self) -> None:
        self.rfile.read(int(self.headers.get("content-length") or 0))
        self.send(*self.answer)

    do_GET = do_POST = do_DELETE = _any  # noqa: N815  (the base class's names)


@pytest.fixture
def url() -> Iterator[str]:
    yield from listening(Gateway)


@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (401, {"error": {"message": "No API key."}}, "No API key. Set TIDEGATE_API_KEY, or give --key-file."),
        (403, {"error": {"message": "No scope."}}, "No scope. Make one: tidegate keys create --scope control:read"),
        (404, {"detail": "Not Found"}, "What answers there is not Tidegate, or is not well (status 404): see --url."),
        (503, {"error": {"message": "It is being replaced."}}, "It is being replaced. Try again in a few seconds."),
    ],
)
def test_each_answer_that_is_none_is_one_line_with_the_next_step(
    url: str, status: int, answer: Any, words: str
) -> None:
    Gateway.answer = (status, answer)
    for name in ("conditions", "status", "tenants list", "override list", "shadow status"):
        result = run(*name.split(), "--url", url)
        assert result.exit_code == 1, result.output
        assert len(result.stderr.splitlines()) == 1
        assert words in result.stderr


def test_tenants_are_listed_and_one_is_shown(url: str) -> None:
    config = PolicyConfig(tenants={"acme": TenantConfig(weight=3.0, budget_usd_max=50.0, concurrent_requests_max=32)})
    state = json.loads(json.dumps(TenantDesk(config, "e", 1_700_000_000 * 10**9).state(1_700_000_000 * 10**9)))
    Gateway.answer = (200, state)
    listed = run("tenants", "list", "--url", url)
    assert listed.exit_code == 0, listed.output
    assert re.search(r"acme +0 +0 +0 +0 +0 +0 +0 +0 of 50 +3 +interactive", listed.stdout)
    shown = run("tenants", "show", "acme", "--url", url).stdout
    assert re.search(r"^Limits +weight +3$", shown, re.MULTILINE)
    assert "tokens_per_minute_max" not in shown
    assert json.loads(run("tenants", "show", "acme", "--url", url, "--json").stdout) == state["tenants"]["acme"]
    missing = run("tenants", "show", "acne", "--url", url)
    assert missing.exit_code == 1
    assert "there is no tenant 'acne'; there are: acme" in missing.stderr


# --- benchmarks -------------------------------------------------------------------------------------------------------

PARTS = {"bare_port", "flat_out"}
"""Programs that benchmarks start; no benchmarks."""


def test_every_benchmark_is_listed_with_what_it_prints() -> None:
    programs = {path.stem for path in (ROOT / "tests/bench").glob("*.py") if "__main__" in path.read_text()}
    assert set(bench_commands.benches()) == programs - PARTS
    assert json.loads(run("bench", "--json").stdout) == bench_commands.benches()


def test_a_benchmark_gets_its_own_options_and_gives_its_own_exit_code() -> None:
    assert run("bench", "rollback", "--no-such-option").exit_code == 2
    assert run("bench", "rollback", "--help").exit_code == 0


def test_an_image_without_tests_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench_commands, "TABLE", tmp_path / "README.md")
    result = run("bench")
    assert result.exit_code == 1
    assert "source checkout" in result.stderr


# --- the program ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_program_runs_from_anywhere_and_completes_words(tmp_path: Path) -> None:
    link = tmp_path / "bin/tidegate"
    link.parent.mkdir()
    link.symlink_to(ROOT / "tidegate")
    listed = subprocess.run([link, "bench"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert listed.stdout.startswith("startup ")
    asked = {"_TIDEGATE_COMPLETE": "complete_bash", "COMP_WORDS": "tidegate tenants ", "COMP_CWORD": "2"}
    completed = subprocess.run([link], env={**os.environ, **asked}, capture_output=True, text=True, check=True)
    assert completed.stdout.split() == ["list", "show"]


@pytest.mark.slow
def test_completion_is_installed_for_the_users_shell(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [ROOT / "tidegate", "--install-completion", "bash"], env=environment, capture_output=True, text=True, check=True
    )
    assert "completion installed" in done.stdout
    assert "_TIDEGATE_COMPLETE=complete_bash" in (tmp_path / ".bash_completions/tidegate.sh").read_text()


def test_without_an_installation_the_program_says_what_to_run(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tidegate", tmp_path)
    done = subprocess.run([tmp_path / "tidegate", "status"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: Tidegate is not installed in {tmp_path}; run: make -C {tmp_path} install\n"


def test_exit_codes_are_documented() -> None:
    text = (ROOT / "deployments/README.md").read_text(encoding="utf-8")
    for code in re.findall(r"\b(\d+) \w", EXIT_CODES):
        assert re.search(rf"^\| {code} \|", text, re.MULTILINE)


def test_wrong_usage_is_exit_code_2() -> None:
    for words in (["stauts"], ["override", "set", "load_bound"], ["decisions", "--limit", "0"]):
        assert run(*words).exit_code == 2
