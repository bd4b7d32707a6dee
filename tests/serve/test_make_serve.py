"""The command line that `make serve` and `make stop` call, on a real Ray head with HAProxy and the emulated engine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments import preflight, preflight_looks, run_state
from deployments.cluster import Ports
from deployments.launch import ROOT, RUN_FOLDER

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]

UP_S_MAX = 120.0


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The shipped file with the emulated engine in vLLM's place."""
    content = yaml.safe_load((ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
    model = content["applications"][0]["args"]["model"]
    for key in ("engine_args", "cpu"):
        model.pop(key)
    model |= {"engine": "emulated", "num_cpus": 0.1}
    return written(tmp_path, content)


def written(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Before and after each test: no run, no port held, no folder; whatever a failing test left is ended."""
    if busy():
        pytest.skip(f"ports are busy: {busy()}")
    before = folders()
    yield
    state = run_state.load(RUN_FOLDER)
    if state is not None:
        left = run_state.end_all(state, 5)
        run_state.forget(RUN_FOLDER, state)
        pytest.fail(f"a run was left behind, {left}")
    assert busy() == {}
    assert folders() <= before
    assert preflight_looks.ray_heads() == ()


def folders() -> set[Path]:
    """Temporary folders of runs."""
    return {path for path in Path(run_state.TEMP_ROOT).glob("tidegate-????????") if path.is_dir()}


def busy() -> dict[int, preflight.Holder | None]:
    return preflight_looks.busy_ports(port.number for port in Ports().listed())


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "deployments.cli", *words]


def begin(config: Path, log: Path, *words: str) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            command("up", "--config", str(config), *words), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )


def wait_for(process: subprocess.Popen[bytes], log: Path, words: str) -> str:
    deadline = time.monotonic() + UP_S_MAX
    while time.monotonic() < deadline and process.poll() is None:
        if words in log.read_text():
            break
        time.sleep(0.2)
    assert words in log.read_text(), log.read_text()
    return log.read_text()


def ask() -> dict[str, Any]:
    body = {"model": "smollm2-135m-instruct", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    request = urllib.request.Request(
        "http://127.0.0.1:8000/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def down() -> subprocess.CompletedProcess[str]:
    return subprocess.run(command("down"), cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_up_answers_tells_how_to_ask_and_ends_from_another_shell(config: Path, tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    process = begin(config, log)
    said = wait_for(process, log, "To end it")
    assert "curl http://127.0.0.1:8000/v1/chat/completions" in said
    assert ask()["choices"][0]["message"]["role"] == "assistant"

    second = subprocess.run(
        command("up", "--config", str(config)), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert second.returncode == 1
    assert second.stderr.splitlines() == [
        "error: Tidegate is already running or starting from this folder; to end it: make stop"
    ]
    assert ask()["choices"]

    assert down().returncode == 0
    assert process.wait(30) == 0
    assert "Traceback" not in log.read_text()
    with pytest.raises(urllib.error.URLError):
        ask()


def test_ctrl_c_during_the_start_leaves_nothing(config: Path, tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    process = begin(config, log)
    wait_for(process, log, "ok starting Ray")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert "Traceback" not in log.read_text()


def test_an_engine_that_does_not_start_is_one_line_and_leaves_nothing(config: Path, tmp_path: Path) -> None:
    content = yaml.safe_load(config.read_text())
    content["applications"][0]["args"]["model"]["emulated"] = {"faults": {"start_failures": 100}}
    log = tmp_path / "up.log"
    process = begin(written(tmp_path, content), log)
    assert process.wait(UP_S_MAX) == 1
    errors = [line for line in log.read_text().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert errors[0].startswith("error: the application did not start: ")
    assert "Traceback" not in log.read_text()


def test_a_supervisor_that_was_killed_can_still_be_ended(config: Path, tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    process = begin(config, log, "--no-wait")
    assert process.wait(UP_S_MAX) == 0
    state = run_state.load(RUN_FOLDER)
    assert state is not None
    assert run_state.members(state)
    refused = subprocess.run(command("up"), cwd=ROOT, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "make stop" in refused.stderr
    assert down().returncode == 0
    assert down().returncode == 0


def test_a_busy_port_is_named_with_its_holder_and_nothing_starts(config: Path) -> None:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", 8404))
        listener.listen()
        done = subprocess.run(
            command("up", "--config", str(config)), cwd=ROOT, capture_output=True, text=True, check=False
        )
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: port 8404 (HAProxy's statistics) is held by ")
    assert f"(pid {os.getpid()}," in lines[0]
    assert not (RUN_FOLDER / "state.json").exists()
