"""A live fleet with recording on: its files hold the traffic without its text, and its decisions come out again."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve

from autoscaling.simulator.recorded import GatewayLine, Header, Numbered, ReplicaLine, RequestLine
from autoscaling.simulator.replay import Replayed, Writer, replay_decisions
from deployments import gateway
from deployments.app import build
from deployments.simulation.recordings import find_writers, read_writer
from tests import loopback
from tests.serve.gateway.conftest import ARGS, MODEL, free_port, start_cluster, stop_cluster, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]

APP = "recording-test"
ENV = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
SECRET = "the owl flies at midnight "
CLIENTS, EACH, TOKENS = 40, 2, 20
DECISIONS = 2
"""The clients go on until the controller has decided this often: whatever it looks at, the load outlasts it."""
SLOW = {"a_ms": 20, "b_ms": 0, "c_ms": 0, "d_ms": 0.02}
"""A step of this engine: 16 of 40 clients fit into its batch, and it does not wait for them on a busy machine."""


@dataclass(frozen=True)
class Run:
    """What one run of the app left."""

    folder: Path
    succeeded: int
    """Answers its clients got."""
    decisions: list[dict[str, Any]]
    """What ``/control/decisions`` said."""


def args(folder: Path) -> dict[str, Any]:
    emulated = ARGS["model"]["emulated"] | {"step": SLOW}
    return ARGS | {
        "model": ARGS["model"] | {"emulated": emulated},
        "recording": {"folder": str(folder)},
        "control": {"tick_ms": 200},
        "scaling": {"replicas_min": 1, "replicas_max": 2},
        "objectives": {"ttft_ms": 100, "itl_ms": 50},
        "admission": {"engine_wait_share": None},  # everything is sent on, whatever its forecast
    }


async def chat(client: httpx.AsyncClient, number: int, turn: int) -> int:
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": SECRET * 30 + f"client {number}, turn {turn}"}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": turn % 2 == 0,
        "stream_options": {"include_usage": True} if turn % 2 == 0 else None,
    }
    return (await client.post("/v1/chat/completions", json=body)).status_code


async def load(url: str) -> Counter[int]:
    """Statuses that clients got who ask until the controller has decided; one more leaves in the middle."""
    decided = asyncio.Event()
    async with loopback.AsyncClient(base_url=url, timeout=60) as client:

        async def one(number: int) -> list[int]:
            found: list[int] = []
            while len(found) < EACH or not decided.is_set():
                found.append(await chat(client, number, len(found)))
            return found

        async def watch() -> None:
            while not decided.is_set():
                if len(await decisions(client)) >= DECISIONS:
                    decided.set()
                await asyncio.sleep(0.1)

        async with asyncio.timeout(120):
            _, *answers = await asyncio.gather(watch(), *(one(number) for number in range(CLIENTS)))
        left = asyncio.create_task(chat(client, 999, 1))
        await asyncio.sleep(0.05)
        left.cancel()
        return Counter(status for some in answers if some for status in some)


async def decisions(client: httpx.AsyncClient) -> list[dict[str, Any]]:
    answer = await client.get("/control/decisions")
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    path, port = tmp_path_factory.mktemp("recording"), free_port()
    url = f"http://127.0.0.1:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway, "ENV", {})
        try:
            start_cluster(port, ENV)
            serve.run(build(args(path)), name=APP, route_prefix="/")
            until(lambda: loopback.get(f"{url}/health").status_code == 200, "a ready replica")
            answers = asyncio.run(load(url))
            assert set(answers) == {200}
            until(lambda: dropped(url)["ok"] > answers[200], "lines written")
            assert dropped(url)["dropped"] == 0
            told = loopback.get(f"{url}/control/decisions").json()
        finally:
            stop_cluster(ENV)
    return Run(path, answers[200], told)


def dropped(url: str) -> dict[str, float]:
    """Lines of the gateway's recording by result."""
    page = loopback.get(f"{url}/metrics").text
    found = [line for line in page.splitlines() if line.startswith("tidegate_recording_lines_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in found}


@pytest.fixture(scope="module")
def writers(run: Run) -> dict[str, Writer]:
    found = find_writers([run.folder], lambda _: None)
    assert [writer.header.source for writer in found] == ["controller", "gateway"]
    return {writer.header.source: writer for writer in found}


def lines(writer: Writer) -> list[Numbered]:
    return list(read_writer(writer, lambda _: None))


def test_every_request_is_there_once_with_its_sizes(run: Run, writers: dict[str, Writer]) -> None:
    requests = [item.line for item in lines(writers["gateway"]) if isinstance(item.line, RequestLine)]
    assert Counter(r.outcome for r in requests) >= Counter({"succeeded": run.succeeded})
    assert len(requests) <= run.succeeded + 1
    done = [r for r in requests if r.outcome == "succeeded"]
    assert {r.output_tokens for r in done} == {TOKENS}
    assert all(r.prompt_tokens and r.prompt_tokens > 150 and len(r.blocks) == 3 for r in done)
    assert len({r.blocks for r in done}) == 1  # one prompt, until its last, unfinished block
    assert any(r.cached_tokens for r in done)
    assert all(r.ttft_ms is not None and 0 < r.ttft_ms <= r.e2e_ms for r in done)
    assert {r.stream for r in done} == {True, False}


def test_no_text_is_in_the_files(run: Run) -> None:
    for path in run.folder.glob("*.jsonl"):
        text = path.read_text()
        assert "owl" not in text
        assert "client 9" not in text
        assert "lorem" not in text


def test_the_controller_s_decisions_come_out_again_byte_for_byte(run: Run, writers: dict[str, Writer]) -> None:
    ticks = [i for i in replay_decisions(lines(writers["controller"])) if isinstance(i, Replayed)]
    assert len(ticks) > 10
    assert [i for i in ticks if not i.equal] == []
    recorded = [d for i in ticks for d in i.recorded.decisions]
    assert len(run.decisions) >= DECISIONS
    assert [(d["seq"], d["lever"], d["reason"]["code"]) for d in run.decisions] == [
        (d.seq, d.lever, d.reason.code) for d in recorded[: len(run.decisions)]
    ]


def test_reports_and_settings_are_those_of_the_live_system(writers: dict[str, Writer]) -> None:
    found = [item.line for item in lines(writers["controller"])]
    header = found[0]
    assert isinstance(header, Header)
    assert header.config.control.tick_ms == 200
    assert header.model == MODEL
    assert any(isinstance(line, ReplicaLine) and line.report.steps for line in found)
    arrivals = sum(line.report.arrivals for line in found if isinstance(line, GatewayLine))
    requests = sum(isinstance(i.line, RequestLine) for i in lines(writers["gateway"]))
    assert abs(arrivals - requests) <= 1
