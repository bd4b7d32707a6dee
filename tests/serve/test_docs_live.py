"""Documentation beside a live service with emulated engines: what its pages show is run as it stands there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from deployments import preflight_looks, run_state
from deployments.cli import cli
from deployments.cluster import Ports
from deployments.launch import ROOT, RUN_FOLDER
from tests import doc_commands, loopback
from tests.doc_commands import Block, Command, Place

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]

URL = "http://127.0.0.1:8000"
UP_S_MAX = 150.0
WITHIN_S = 60.0
COMMANDS = [command for command in doc_commands.all_commands(Place.LIVE) if not command.text.startswith("make stop")]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The shipped configuration with the emulated engine; what stands for what a reader would put into a command."""
    if busy := preflight_looks.busy_ports(port.number for port in Ports().listed()):
        pytest.skip(f"ports are busy: {busy}")
    folder = tmp_path_factory.mktemp("docs")
    targets = {path: path.read_bytes() for path in (ROOT / "dashboards/prometheus/targets").glob("*.json")}
    shipped = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
    model = shipped["applications"][0]["args"]["model"]
    for key in ("engine_args", "cpu"):
        model.pop(key)
    model |= {"engine": "emulated", "num_cpus": 0.1}
    (folder / "serve_config.yaml").write_text(yaml.safe_dump(shipped), encoding="utf-8")
    up = [sys.executable, "-m", "deployments.cli", "up", "--detach", "--config", str(folder / "serve_config.yaml")]
    started = subprocess.run(up, cwd=ROOT, capture_output=True, text=True, check=False, timeout=UP_S_MAX)
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        yield {"ID": an_override(), "42": a_decision(), "NAME": "smollm2-135m-instruct", "tg-5f0c...": a_request()}
        stopped = subprocess.run(["make", "stop"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)
        assert stopped.returncode == 0, stopped.stderr
        assert run_state.load(RUN_FOLDER) is None
    finally:
        for path, content in targets.items():  # `dashboards targets` writes them
            path.write_bytes(content)
        if (state := run_state.load(RUN_FOLDER)) is not None:
            run_state.end_all(state, 5)
            run_state.forget(RUN_FOLDER, state)


def an_override() -> str:
    body = {"knob": "load_bound", "value": 2.0, "expires_in_s": 600}
    return str(loopback.post(f"{URL}/control/overrides", json=body).json()["id"])


def a_decision() -> str:
    """The number of some decision: the beginning of an override is in the ledger at the next tick."""
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        found = loopback.get(f"{URL}/control/decisions").json()
        if found:
            return str(found[-1]["seq"])
        time.sleep(0.2)
    raise AssertionError("no decision was made")


def a_request() -> str:
    body = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    return str(loopback.post(f"{URL}/v1/chat/completions", json=body, timeout=60).headers["x-request-id"])


def named(shown: Command | Block) -> str:
    return f"{shown.where} {shown.text[:60]}"


@pytest.mark.parametrize("command", COMMANDS, ids=named)
def test_a_command_runs_beside_a_live_service(command: Command, service: dict[str, str]) -> None:
    if not command.text.startswith(doc_commands.PROGRAM):
        done = subprocess.run(["bash", "-ec", command.text], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["choices"][0]["message"]["content"]
        return
    deadline = time.monotonic() + WITHIN_S
    while True:  # a service that has just started may still be told to be unwell
        result = CliRunner().invoke(cli, command.words(service), env={"TIDEGATE_API_KEY": ""})
        if result.exit_code == 0 or time.monotonic() > deadline or "doctor" not in command.text:
            break
        time.sleep(1)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip()


@pytest.mark.parametrize("program", doc_commands.programs(), ids=lambda block: block.where)
def test_a_program_runs_beside_a_live_service(program: Block, service: dict[str, str], tmp_path: Path) -> None:
    """On the service's own Ray where it uses Ray: the token is in its default file, where ``up`` put it."""
    file = tmp_path / "program.py"
    file.write_text(program.text, encoding="utf-8")
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_ADDRESS": "127.0.0.1:6379", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, file], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2_000:]
    assert re.search(r"\w", done.stdout)
