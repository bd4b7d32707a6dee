"""Servers under contract: the emulated engine over a real socket, always; real vLLM with ``-m engine``.

vLLM ends with its module: even idle it keeps a core busy, which whatever runs next would miss.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests import loopback

ROOT = Path(__file__).parents[2]
MODEL_NAME = "smollm2-135m-instruct"
EMULATED_START_S = 30
VLLM_START_S = 240
INSTANT = '{"step": {"a_ms": 0, "b_ms": 0, "c_ms": 0, "d_ms": 0}}'


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def serve_until_done(command: list[str], port: int, start_s: float, env: dict[str, str], log: Path) -> Iterator[str]:
    """Start a server in a process group of its own, wait until it is healthy, yield its URL, end the group."""
    url = f"http://127.0.0.1:{port}"
    with log.open("wb") as out:
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        deadline = time.monotonic() + start_s
        while not _healthy(url):
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"{command[2]} did not start:\n{log.read_text()[-4_000:]}")
            time.sleep(0.1)
        yield url
    finally:
        _end(process)


def _healthy(url: str) -> bool:
    try:
        return loopback.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def _end(process: subprocess.Popen[bytes]) -> None:
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, sign)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                continue


@pytest.fixture(scope="session")
def emulated_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Emulated engine whose steps take no time."""
    port = free_port()
    command = [sys.executable, "-m", "deployments.emulated_engine", "--port", str(port), "--model", MODEL_NAME]
    log = tmp_path_factory.mktemp("emulated") / "log"
    yield from serve_until_done([*command, "--settings", INSTANT], port, EMULATED_START_S, dict(os.environ), log)


@pytest.fixture(scope="module")
def vllm_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Real vLLM with the bundled model on the CPU."""
    folder = os.environ.get("TIDEGATE_TEST_MODEL") or str(Path.home() / ".cache/tidegate/models" / MODEL_NAME)
    if not (Path(folder) / "config.json").exists():
        pytest.skip(f"no model in {folder}; `make model` puts it there")
    port = free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder,
        "--served-model-name", MODEL_NAME,
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--host", "127.0.0.1", "--port", str(port),
        "--enable-prompt-tokens-details",
    ]  # fmt: skip
    env = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    yield from serve_until_done(command, port, VLLM_START_S, env, tmp_path_factory.mktemp("vllm") / "log")
