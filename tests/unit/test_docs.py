"""Documentation: every command it shows has a place where it is executed, and those that need no service run here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deployments.cli import cli
from tests import doc_commands
from tests.doc_commands import ROOT, Block, Command, Place
from tests.unit.simulator.test_replay_command import folder, simulated

__all__ = ["folder", "simulated"]  # fixtures: the recording of a simulated fleet

LOAD = "poisson:rate=2,prompt=200,output=20,duration=5"
SHORTER = {"duration=300": "duration=5", "COUNT=500": "COUNT=1"}
"""Loads are cut to seconds; nothing else of a command is changed."""
COMMAND = re.compile(
    r"^ {4}(\$ )?(make|curl|ray|serve|docker|kubectl|pip|git|python3?|\./tidegate|\.venv/\S+|requirements/\S+) ",
    re.MULTILINE,
)


def test_every_command_has_one_place() -> None:
    found = doc_commands.all_commands()
    assert len(found) > 40
    for command in found:
        doc_commands.place(command)


def test_no_command_hides_in_an_indented_block() -> None:
    hidden = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in doc_commands.documents()
        for match in COMMAND.finditer(re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL))
    ]
    assert hidden == []


def test_every_reason_and_every_pattern_is_needed() -> None:
    texts = [command.text for command in doc_commands.all_commands()]
    for pattern in (*doc_commands.NOT_HERE, *doc_commands.LIVE, *doc_commands.UNIT):
        assert any(re.search(pattern, text) for text in texts), pattern


def test_links_lead_to_pages_that_are_there() -> None:
    for path in doc_commands.documents():
        text = re.sub(r"^```.*?^```$|^ {4}.*$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
            assert target.startswith("http") or (path.parent / target).exists(), f"{path.relative_to(ROOT)}: {target}"


def test_commands_are_read_as_a_shell_reads_them() -> None:
    text = "make a B='1 # 2'  # why\n# nothing\ncurl x \\\n    -d '{\n  \"a\": 1}'\n./tidegate sim LOAD --out result\n"
    found = list(doc_commands.commands(Block(ROOT / "README.md", 1, "sh", text)))
    assert [command.text for command in found] == [
        "make a B='1 # 2'", "curl x -d '{\n  \"a\": 1}'", "./tidegate sim LOAD --out result"
    ]  # fmt: skip
    assert found[2].words({"LOAD": "l"}) == ["sim", "l", "--out", "result"]
    with pytest.raises(LookupError, match="has 0 places"):
        doc_commands.place(Command("README.md:1", "rm -rf x"))


def named(command: Command) -> str:
    return f"{command.where} {command.text[:60]}"


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like this one, so that what commands write does not land here."""
    for name in (
        "Makefile",
        "serve_config.yaml",
        "policies",
        "autoscaling",
        "dashboards",
        "deployments",
        "requirements",
    ):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def a_key(file: Path) -> str:
    made = CliRunner().invoke(cli, ["keys", "create", "--file", str(file), "--json"])
    return str(json.loads(made.stdout)["id"])


@pytest.mark.slow
@pytest.mark.parametrize("command", doc_commands.all_commands(Place.UNIT), ids=named)
def test_a_command_that_needs_no_service_runs(command: Command, scratch: Path, folder: Path) -> None:
    text = command.text
    for long, short in SHORTER.items():
        text = text.replace(long, short)
    command = Command(command.where, text)
    if not text.startswith((doc_commands.PROGRAM, "python -m deployments.cli")):
        done = subprocess.run(["bash", "-ec", text], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return
    keys = scratch / "keys.jsonl"
    values = {"LOAD": LOAD, "FOLDER": str(folder), "ID": a_key(keys)}
    shutil.copy(ROOT / "serve_config.yaml", scratch / "other.yaml")
    shutil.copy(ROOT / "autoscaling/simulator/profiles/h100-llama-3.1-8b-bf16.json", scratch / "mine.json")
    words = command.words(values)
    if words[0] == "keys" and "--file" not in words:
        words += ["--file", str(keys)]  # the configuration that is shipped names none
    result = CliRunner().invoke(cli, words, env={"HOME": str(scratch)})
    assert result.exit_code == 0, result.output
