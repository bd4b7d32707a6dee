"""The engine as a process of its own, through a real socket and real clients."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest

from tests import loopback
from tests.contract.conftest import EMULATED_START_S, ROOT, free_port, serve_until_done

SETTINGS = '{"step": {"a_ms": 3, "b_ms": 0, "c_ms": 0, "d_ms": 0}}'
USER = [{"role": "user", "content": "Name a river, its source, its length and the sea it flows into."}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "deployments.emulated_engine", "--port", str(port), "--settings", SETTINGS]
    yield from serve_until_done(command, port, EMULATED_START_S, {}, tmp_path_factory.mktemp("engine") / "log")


@pytest.fixture
def faults(url: str) -> Iterator[httpx.Client]:
    with loopback.Client(base_url=url, timeout=20) as client:
        yield client
        client.post("/emulation/faults", json={"kind": "none", "after_tokens": 0, "signals": "ok"})


def metric(url: str, name: str) -> float:
    page = loopback.get(f"{url}/metrics").text
    return float(next(line.rsplit(" ", 1)[1] for line in page.split("\n") if line.startswith(f"{name}{{")))


def test_openai_client_chats_streams_completes_and_responds(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(model=model, messages=USER, max_tokens=12)  # type: ignore[arg-type]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    parts = []
    with client.chat.completions.create(  # type: ignore[call-overload]
        model=model, messages=USER, max_tokens=12, stream=True, stream_options={"include_usage": True}
    ) as stream:
        for chunk in stream:
            parts += [c.delta.content or "" for c in chunk.choices]
    assert "".join(parts) == whole.choices[0].message.content
    assert chunk.usage.prompt_tokens_details.cached_tokens > 0
    completion = client.completions.create(model=model, prompt="The river", max_tokens=5)
    assert completion.choices[0].finish_reason == "length"
    response = client.responses.create(model=model, input="Name a river.", max_output_tokens=400)
    assert response.status == "completed"
    assert response.output_text
    deltas = [
        event.delta
        for event in client.responses.create(model=model, input="Name a river.", stream=True)
        if event.type == "response.output_text.delta"
    ]
    assert "".join(deltas) == response.output_text


def test_openai_client_understands_the_errors(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="nobody", messages=USER)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="smollm2-135m-instruct", messages=USER, temperature=-1)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.completions.create(model="smollm2-135m-instruct", prompt="a" * 20_000)


def test_anthropic_client_writes_and_streams(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    asked = {"model": "smollm2-135m-instruct", "max_tokens": 12, "messages": USER}
    whole = client.messages.create(**asked)  # type: ignore[call-overload]
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
    with client.messages.stream(**asked) as stream:  # type: ignore[arg-type]
        assert "".join(stream.text_stream) == whole.content[0].text
        assert stream.get_final_message().usage.output_tokens == 12
    counted = client.messages.count_tokens(model="smollm2-135m-instruct", messages=USER)  # type: ignore[arg-type]
    assert counted.input_tokens == whole.usage.input_tokens


@pytest.mark.parametrize("stream", [True, False])
def test_closed_socket_aborts_the_work(url: str, stream: bool) -> None:
    aborted = metric(url, "emulated:requests_aborted_total")
    body = {"messages": USER, "max_tokens": 2_000, "ignore_eos": True, "stream": stream}
    if stream:
        with loopback.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
            lines = answer.iter_lines()
            for _ in range(6):
                next(lines)
    else:
        with pytest.raises(httpx.ReadTimeout):
            loopback.post(f"{url}/v1/chat/completions", json=body, timeout=httpx.Timeout(5, read=0.2))
    deadline = time.monotonic() + 5
    while metric(url, "vllm:num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.01)
    assert metric(url, "vllm:num_requests_running") == 0
    assert metric(url, "emulated:requests_aborted_total") == aborted + 1
    assert metric(url, "emulated:tokens_after_abort_total") == 0


def test_cut_is_seen_as_a_broken_response(url: str, faults: httpx.Client) -> None:
    assert faults.post("/emulation/faults", json={"kind": "cut", "after_tokens": 3}).json()["kind"] == "cut"
    for stream in (True, False):
        with pytest.raises(httpx.RemoteProtocolError):
            faults.post("/v1/chat/completions", json={"messages": USER, "stream": stream})


def test_wrong_faults_change_nothing(faults: httpx.Client) -> None:
    answer = faults.post("/emulation/faults", json={"kindd": "cut"})
    assert answer.status_code == 400
    assert "kindd" in answer.json()["error"]
    assert faults.post("/emulation/faults", content=b"[").status_code == 400
    assert faults.post("/v1/chat/completions", json={"messages": USER}).status_code == 200


def test_die_marker_ends_the_process_with_its_status(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-m", "deployments.emulated_engine", "--port", str(port)]
    command += ["--settings", '{"faults": {"die_marker": "poison"}}']
    with subprocess.Popen(command, cwd=ROOT) as process:
        url = f"http://127.0.0.1:{port}"
        for _ in range(300):
            try:
                loopback.get(f"{url}/health")
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        with pytest.raises(httpx.HTTPError):
            loopback.post(f"{url}/v1/completions", json={"prompt": "some poison"}, timeout=10)
        assert process.wait(10) == 13


def test_wrong_settings_are_named() -> None:
    command = [sys.executable, "-m", "deployments.emulated_engine", "--port", "1", "--settings", '{"kv_blocs": 1}']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "kv_blocs" in done.stderr
