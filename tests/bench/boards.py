"""A real Prometheus beside a live fleet of emulated engines: what every expression of boards and rules finds.

Two gateways behind HAProxy, each a target of its own, as ``dashboards targets`` finds them; the controller through
HAProxy. Three minutes of mixed load: classes, whole answers and streams, tasks with and without an outcome, a tenant
with a budget, an engine that fails requests for a while. Then every expression and variable is asked for once.

    python -m tests.bench.boards [--seconds 180] [--port 8000]

Exit code 1 where an expression has no data and no reason is written why, or a variable has no value.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from dashboards.boards import all_boards
from dashboards.expressions import Answer, of_boards, of_rules
from deployments.dashboard_check import Prometheus, PrometheusError, answers, resolved
from deployments.dashboard_commands import SERVES_HAPROXY
from deployments.dashboard_publish import gateways_of, newest_config, targets
from tests.bench import harness as h
from tests.bench.fleet import Fleet, start, stop

SOURCE = h.ROOT / "dashboards/prometheus"
SCRAPE = "5s"
MODEL = "smollm2-135m-instruct"
EMULATED = {
    "step": {"a_ms": 10, "b_ms": 0.3, "c_ms": 0.05, "d_ms": 0.02},
    "running_seqs_max": 12,
    "kv_blocks": 2_048,
    "context_tokens_max": 8_192,
}
SECTIONS: dict[str, Any] = {
    "gateway": {"replicas": 2, "report_interval_ms": 500},
    "scaling": {"replicas_min": 2, "replicas_max": 3, "down_window_s": 20.0},
    "objectives": {"ttft_ms": 800, "itl_ms": 60},
    "prices": {
        "replica_usd_per_hour": 2.0,
        "prompt_usd_per_mtok": 0.1, "cached_usd_per_mtok": 0.02, "output_usd_per_mtok": 0.4,
    },
    "tenants": {"default": {"budget_usd_max": 100.0, "budget_period_s": 86_400}},
    "tasks": {"idle_s_max": 20},
}  # fmt: skip


@contextmanager
def prometheus(folder: Path, addresses: list[str], front: str) -> Iterator[str]:
    """Run a Prometheus with the project's configuration and rules; its address. Ends it, and its data."""
    binary = shutil.which("prometheus")
    if binary is None:
        raise SystemExit("error: no prometheus here (Debian: apt install prometheus)")
    config = yaml.safe_load((SOURCE / "prometheus.yml").read_text(encoding="utf-8"))
    config["global"] = dict.fromkeys(config["global"], SCRAPE)
    rules = yaml.safe_load((SOURCE / "rules.yaml").read_text(encoding="utf-8"))
    for group in rules["groups"]:
        group["interval"] = SCRAPE
    (folder / "targets").mkdir()
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    (folder / "rules.yaml").write_text(yaml.safe_dump(rules), encoding="utf-8")
    (folder / "targets/gateways.json").write_text(targets(addresses, MODEL), encoding="utf-8")
    (folder / "targets/controller.json").write_text(targets([front], MODEL), encoding="utf-8")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        listen = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [binary, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={listen}"], stdout=log, stderr=log)
    try:
        _until_ready(f"http://{listen}/-/ready", process, folder / "log")
        yield f"http://{listen}"
    finally:
        process.terminate()
        process.wait(30)


def _until_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        if process.poll() is not None:
            break
        time.sleep(0.2)
    raise SystemExit(f"error: Prometheus does not start: {log.read_text()[-2_000:]}")


# --- load -------------------------------------------------------------------------------------------------------------

CLASSES = ("interactive", "standard", "standard", "batch")


async def one_client(session: aiohttp.ClientSession, url: str, number: int, end: float, seen: Counter[str]) -> None:
    """Requests one after the other; each third belongs to a task of three calls, each fourth is not streamed."""
    turn = 0
    while time.monotonic() < end:
        headers = {"x-tidegate-class": CLASSES[number % len(CLASSES)]}
        if number % 3 == 0:
            headers["x-tidegate-task"] = f"task-{number}-{turn // 3}"
            if turn % 3 == 2 and number % 2 == 0:
                headers["x-tidegate-task-outcome"] = "success" if turn % 2 else "failure"
        text = "the same beginning " * 40 + f"client {number} turn {turn} " + "river " * (5 if turn % 4 else 300)
        messages = [{"role": "user", "content": text}]
        if (number + turn) % 4 == 0:
            body = {"model": MODEL, "messages": messages, "max_tokens": 20}
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
                    await answer.read()
                    seen[str(answer.status)] += 1
        else:
            result = await h.stream_chat(session, messages, 20, url=url, headers=headers)
            seen[str(result.status)] += 1
        turn += 1
        if number % 5 == 4:
            await asyncio.sleep(0.5)


async def load(url: str, fleet: Fleet, seconds: float) -> Counter[str]:
    """Few clients, then many, then one engine that fails, then few."""
    seen = Counter[str]()
    begin = time.monotonic()
    async with h.client_session() as session:
        calm = [asyncio.create_task(one_client(session, url, n, begin + seconds, seen)) for n in range(10)]
        await asyncio.sleep(seconds * 0.3)
        burst = [asyncio.create_task(one_client(session, url, n, begin + seconds * 0.6, seen)) for n in range(10, 50)]
        await asyncio.sleep(seconds * 0.3)
        ill = min(str(counters["replica_id"]) for counters in await asyncio.to_thread(fleet.counters))
        await asyncio.to_thread(fleet.faults, ill, kind="unavailable", share=1.0)
        await asyncio.sleep(min(8.0, seconds * 0.1))
        await asyncio.to_thread(fleet.faults, kind="none")
        await asyncio.gather(*calm, *burst)
    return seen


# --- report -----------------------------------------------------------------------------------------------------------


def report(found: list[Answer], values: Mapping[str, list[str]], gateways: int) -> bool:
    """Print the tables; whether all bars hold."""
    rows = [
        [a.expression.place, str(a.series) if a.series else a.absence or "NO DATA: " + a.expression.text] for a in found
    ]
    h.table("Every expression: series with a value, or why there is none", ["where", "found"], rows)
    h.table("Variables", ["variable", "values"], [[name, ", ".join(texts)] for name, texts in values.items()])
    data = sum(answer.series > 0 for answer in found)
    known = sum(answer.series == 0 and answer.fine for answer in found)
    print(f"{len(found)} expressions: {data} have data, {known} have none for a reason that is written")
    return all(
        [
            h.verdict(
                data + known == len(found), f"{len(found) - data - known} expressions have no data and no reason"
            ),
            h.verdict(
                all(values.values()), f"{sum(map(bool, values.values()))} of {len(values)} variables have values"
            ),
            h.verdict(len(values["instance"]) == gateways == 2, f"{gateways} gateways, each a target of its own"),
        ]
    )


def main() -> int:
    """Run and report; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--port", type=int, default=8_000)
    options = parser.parse_args()
    front = f"127.0.0.1:{options.port}"
    with h.ray_serve(port=options.port), tempfile.TemporaryDirectory(prefix="tidegate-boards-") as temporary:
        fleet = start(2, EMULATED, **SECTIONS)
        addresses = gateways_of(newest_config(SERVES_HAPROXY).read_text(encoding="utf-8"))
        with prometheus(Path(temporary), addresses, front) as address:
            seen = asyncio.run(load(f"http://{front}", fleet, options.seconds))
            asked = Prometheus(address)
            documents = list(all_boards().values())
            try:
                found = answers(asked, [*of_boards(documents), *of_rules()])
                values = resolved(asked, documents)
            except PrometheusError as error:
                print(f"FAIL  {error}")
                return 1
        stop()
    print(f"answers to clients: {dict(seen)}")
    return 0 if report(found, values, len(addresses)) else 1


if __name__ == "__main__":
    sys.exit(main())
