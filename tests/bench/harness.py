"""Starts Ray, Serve and HAProxy in this process for a benchmark, measures streams, prints tables.

One cluster at a time: HAProxy's files and ports are fixed by Serve. Everything started here ends in ``System.stop``.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from deployments.cluster import SERVE_ENVIRONMENT
from deployments.haproxy import BINARY, stand_before

ROOT = Path(__file__).resolve().parents[2]
URL = "http://127.0.0.1:8000"
SERVE_ENV = {
    **SERVE_ENVIRONMENT,
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "4",
    "PYTHONPATH": str(ROOT),
}
HAPROXY_PORTS = {"STATS": 8404, "METRICS": 9101}
"""Serve's, where the environment names no others."""


def default_args(**overrides: Any) -> dict[str, Any]:
    """Return the ``args`` of serve_config.yaml with ``section={...}`` overrides merged in, one level deep."""
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    args: dict[str, Any] = config["applications"][0].get("args", {})
    for section, values in overrides.items():
        merged = dict(args.get(section) or {})
        for key, value in values.items():
            both = isinstance(value, dict) and isinstance(merged.get(key), dict)
            merged[key] = {**merged[key], **value} if both else value
        args[section] = merged
    return args


def emulated_args(**overrides: Any) -> dict[str, Any]:
    """Like :func:`default_args`, with the emulated engine in the place of vLLM."""
    model = {"engine": "emulated", "num_cpus": 0.1, **overrides.pop("model", {})}
    args = default_args(model=model, **overrides)
    for key in ("engine_args", "cpu", "source"):
        args["model"].pop(key, None)
    return args


@contextmanager
def ray_serve(haproxy: bool = True, port: int = 8000, start: Callable[[], str] | None = None) -> Iterator[None]:
    """Run Ray and Serve on loopback for the duration of the block. ``start`` starts a cluster of nodes: its address.

    Serve's constants are read when it is imported, so this must be the first import of ``ray.serve`` in the process.
    """
    if "ray.serve" in sys.modules and haproxy != (os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"):
        raise RuntimeError("ray.serve was imported with another proxy mode; use one process per mode")
    os.environ.update(SERVE_ENV if haproxy else {**SERVE_ENV, "RAY_SERVE_ENABLE_HA_PROXY": "0"})
    scripts = tempfile.TemporaryDirectory(prefix="tidegate-haproxy-")
    ports = (os.environ.get(f"RAY_SERVE_HAPROXY_{name}_PORT", number) for name, number in HAPROXY_PORTS.items())
    stand_before(os.environ, Path(scripts.name), tuple(int(number) for number in ports))
    import ray
    from ray import serve

    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if start is None:
        ray.init(num_cpus=8, include_dashboard=False, **quiet)
    else:
        ray.init(address=start(), **quiet)
    # A run that is told to end must end what it started: HAProxy would keep its ports.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()
        os.environ.pop(BINARY, None)
        scripts.cleanup()


def deploy(args: dict[str, Any], name: str = "tidegate", route_prefix: str = "/") -> None:
    """Deploy one Tidegate application and wait until it is running."""
    from ray import serve

    from deployments.app import build

    serve.run(build(args), name=name, route_prefix=route_prefix, blocking=False)


@dataclass
class StreamResult:
    """One streamed request as its client saw it. Times in ms."""

    status: int = 0
    ttft_ms: float | None = None
    e2e_ms: float = 0.0
    gaps_ms: list[float] = field(default_factory=list)
    text: str = ""
    complete: bool = False
    error: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    replica: str = ""

    @property
    def failed(self) -> bool:
        """Anything a client would not call a success."""
        return self.status != 200 or not self.complete or bool(self.error)


def _read_event(line: bytes, result: StreamResult) -> bool:
    """Take one SSE line into ``result``; return whether it carried text."""
    if not line.startswith(b"data: "):
        return False
    payload = line[6:].strip()
    if payload == b"[DONE]":
        result.complete = True
        return False
    event = json.loads(payload)
    if "error" in event:
        result.error = str(event["error"])[:200]
        return False
    result.usage = event.get("usage") or result.usage
    choices = event.get("choices") or []
    text = (choices[0].get("delta") or {}).get("content") if choices else None
    result.text += text or ""
    return bool(text)


async def stream_chat(
    session: aiohttp.ClientSession,
    messages: Sequence[dict[str, str]],
    tokens: int,
    *,
    url: str = URL,
    model: str = "smollm2-135m-instruct",
    headers: dict[str, str] | None = None,
    timeout_s: float = 300,
    started: asyncio.Event | None = None,
) -> StreamResult:
    """Send one streaming chat request of exactly ``tokens`` output tokens and time what comes back.

    ``started`` is set at the first token, or at the end of a request that never got one.
    """
    body = {
        "model": model, "messages": list(messages), "max_tokens": tokens, "stream": True, "temperature": 0,
        "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    result, start = StreamResult(), time.perf_counter()
    last = start
    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=timeout) as response:
            result.status = response.status
            result.replica = response.headers.get("x-tidegate-replica", "")
            if response.status != 200:
                result.error = (await response.text())[:300]
            async for line in response.content:
                if _read_event(line, result):
                    now = time.perf_counter()
                    if result.ttft_ms is None:
                        result.ttft_ms = (now - start) * 1e3
                        if started is not None:
                            started.set()
                    else:
                        result.gaps_ms.append((now - last) * 1e3)
                    last = now
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.e2e_ms = (time.perf_counter() - start) * 1e3
    if started is not None:
        started.set()
    return result


def client_session() -> aiohttp.ClientSession:
    """Return a session without a connection limit."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))


async def control_state(session: aiohttp.ClientSession, url: str = URL) -> dict[str, Any]:
    """Return ``GET /control/state``, or an empty dict while the controller is away."""
    try:
        async with session.get(f"{url}/control/state", timeout=aiohttp.ClientTimeout(total=5)) as response:
            return dict(await response.json()) if response.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError):
        return {}


async def wait_for(check: Any, timeout_s: float, every_s: float = 0.25) -> float:
    """Await ``check()`` until it is true; return the seconds it took, raise ``TimeoutError`` after ``timeout_s``."""
    start = time.perf_counter()
    while time.perf_counter() - start < timeout_s:
        if await check():
            return time.perf_counter() - start
        await asyncio.sleep(every_s)
    raise TimeoutError(f"not true after {timeout_s:g} s")


def quantile(values: Sequence[float], q: float) -> float:
    """Return quantile ``q`` of ``values`` by nearest rank; NaN when empty."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def median(values: Sequence[float]) -> float:
    """Return the median; NaN when empty."""
    return statistics.median(values) if values else float("nan")


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a Markdown table that can be pasted into README.md."""
    print(f"\n{title}\n")
    print("| " + " | ".join(header) + " |")
    print("| " + " | ".join("---" for _ in header) + " |")
    for row in rows:
        print("| " + " | ".join(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row) + " |")
    print(flush=True)


def verdict(ok: bool, text: str) -> bool:
    """Print one bar's outcome and return it."""
    print(f"{'PASS' if ok else 'FAIL'}  {text}", flush=True)
    return ok
