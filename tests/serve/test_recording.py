"""A live fleet with recording on: its files hold the traffic without its text, and its decisions come out again."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
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
from tests.serve.gateway.conftest import ARGS, MODEL, free_port, start_cluster, stop_cluster, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]

APP = "recording-test"
ENV = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}
SECRET = "the owl flies at midnight "
CLIENTS, EACH, TOKENS = 40, 6, 20


def args(folder: Path) -> dict[str, Any]:
    return ARGS | {
        "recording": {"folder": str(folder)},
        "control": {"tick_ms": 200},
        "scaling": {"replicas_min": 1, "replicas_max": 2},
        "objectives": {"ttft_ms": 100, "itl_ms": 50},
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
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def one(number: int) -> list[int]:
            return [await chat(client, number, turn) for turn in range(EACH)]

        answers = await asyncio.gather(*(one(number) for number in range(CLIENTS)))
        left = asyncio.create_task(chat(client, 999, 1))
        await asyncio.sleep(0.05)
        left.cancel()
        return Counter(status for some in answers for status in some)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recording that one run of the app left."""
    path, port = tmp_path_factory.mktemp("recording"), free_port()
    url = f"http://127.0.0.1:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gateway, "ENV", {})
        try:
            start_cluster(port, ENV)
            serve.run(build(args(path)), name=APP, route_prefix="/")
            until(lambda: httpx.get(f"{url}/health").status_code == 200, "a ready replica")
            assert asyncio.run(load(url)) == {200: CLIENTS * EACH}
            until(lambda: len(httpx.get(f"{url}/control/decisions").json()) >= 2, "decisions")
            until(lambda: dropped(url)["ok"] > CLIENTS * EACH, "lines written")
            assert dropped(url)["dropped"] == 0
            decisions = httpx.get(f"{url}/control/decisions").json()
            (path / "decisions.json").write_text(json.dumps(decisions))
        finally:
            stop_cluster(ENV)
    return path


def dropped(url: str) -> dict[str, float]:
    """Lines of the gateway's recording by result."""
    page = httpx.get(f"{url}/metrics").text
    found = [line for line in page.splitlines() if line.startswith("tidegate_recording_lines_total{")]
    return {line.split('"')[1]: float(line.split()[-1]) for line in found}


@pytest.fixture(scope="module")
def writers(folder: Path) -> dict[str, Writer]:
    found = find_writers([folder], lambda _: None)
    assert [writer.header.source for writer in found] == ["controller", "gateway"]
    return {writer.header.source: writer for writer in found}


def lines(writer: Writer) -> list[Numbered]:
    return list(read_writer(writer, lambda _: None))


def test_every_request_is_there_once_with_its_sizes(writers: dict[str, Writer]) -> None:
    requests = [item.line for item in lines(writers["gateway"]) if isinstance(item.line, RequestLine)]
    assert Counter(r.outcome for r in requests) >= Counter({"succeeded": CLIENTS * EACH})
    assert len(requests) <= CLIENTS * EACH + 1
    done = [r for r in requests if r.outcome == "succeeded"]
    assert {r.output_tokens for r in done} == {TOKENS}
    assert all(r.prompt_tokens and r.prompt_tokens > 150 and len(r.blocks) == 3 for r in done)
    assert len({r.blocks for r in done}) == 1  # one prompt, until its last, unfinished block
    assert any(r.cached_tokens for r in done)
    assert all(r.ttft_ms is not None and 0 < r.ttft_ms <= r.e2e_ms for r in done)
    assert {r.stream for r in done} == {True, False}


def test_no_text_is_in_the_files(folder: Path) -> None:
    for path in folder.glob("*.jsonl"):
        text = path.read_text()
        assert "owl" not in text
        assert "client 9" not in text
        assert "lorem" not in text


def test_the_controller_s_decisions_come_out_again_byte_for_byte(folder: Path, writers: dict[str, Writer]) -> None:
    ticks = [i for i in replay_decisions(lines(writers["controller"])) if isinstance(i, Replayed)]
    assert len(ticks) > 10
    assert [i for i in ticks if not i.equal] == []
    recorded = [d for i in ticks for d in i.recorded.decisions]
    told = json.loads((folder / "decisions.json").read_text())
    assert len(told) >= 2
    assert [(d["seq"], d["lever"], d["reason"]["code"]) for d in told] == [
        (d.seq, d.lever, d.reason.code) for d in recorded[: len(told)]
    ]


def test_reports_and_settings_are_those_of_the_live_system(folder: Path, writers: dict[str, Writer]) -> None:
    found = [item.line for item in lines(writers["controller"])]
    header = found[0]
    assert isinstance(header, Header)
    assert header.config.control.tick_ms == 200
    assert header.model == MODEL
    assert any(isinstance(line, ReplicaLine) and line.report.steps for line in found)
    arrivals = sum(line.report.arrivals for line in found if isinstance(line, GatewayLine))
    requests = sum(isinstance(i.line, RequestLine) for i in lines(writers["gateway"]))
    assert abs(arrivals - requests) <= 1
