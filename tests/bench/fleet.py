"""A live fleet of emulated engines for a benchmark: deploy it, play faults, watch processes and pages."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.bench import harness as h

APP = "tidegate"
REPORT_MS = 500


def start(
    replicas: int, emulated: dict[str, Any], *, auth: Any = "none", num_cpus: float = 0.1, **sections: Any
) -> Fleet:
    """Deploy a fleet of fixed size and wait until all of it is there. Inside ``harness.ray_serve`` only."""
    from ray import serve

    args = h.emulated_args(
        model={"emulated": emulated, "report_interval_ms": REPORT_MS, "num_cpus": num_cpus},
        **{
            "gateway": {"report_interval_ms": REPORT_MS},
            "scaling": {"replicas_min": replicas, "replicas_max": replicas},
            **sections,
        },
    )
    args["auth"] = auth
    h.deploy(args, name=APP)
    fleet = Fleet(serve.get_deployment_handle("Engine", APP), replicas)
    fleet.until(lambda: len(fleet.counters()) == replicas, 120, "all replicas")
    time.sleep(3)  # HAProxy has the gateway's own port, gateway and controller have heard from each replica
    return fleet


def stop() -> None:
    """Remove the fleet."""
    from ray import serve

    serve.delete(APP)


@dataclass
class Fleet:
    """The running engines, by the handle of their deployment."""

    handle: Any
    replicas: int

    def counters(self) -> list[dict[str, Any]]:
        """Counters of each replica that answers; none while Serve still names one that is dead."""
        from ray.exceptions import RayError

        try:
            found: list[dict[str, Any]] = self.handle.broadcast("counters").results(timeout_s=20)
        except RayError:
            return []
        return found

    def total(self, name: str) -> int:
        """Sum of one counter over the replicas."""
        return sum(int(c[name]) for c in self.counters())

    def faults(self, replica_id: str | None = None, **changes: Any) -> None:
        """Change the faults of one replica, or of all."""
        self.handle.broadcast("set_faults", changes, replica_id).results(timeout_s=20)

    def kill(self, replica_id: str) -> None:
        """SIGKILL one replica's process."""
        (pid,) = [c["pid"] for c in self.counters() if c["replica_id"] == replica_id]
        os.kill(pid, signal.SIGKILL)

    def until(self, check: Callable[[], Any], seconds: float, what: str) -> float:
        """Ask until it is true; the seconds it took. Raises ``TimeoutError``."""
        begin = time.perf_counter()
        while time.perf_counter() - begin < seconds:
            if check():
                return time.perf_counter() - begin
            time.sleep(0.2)
        raise TimeoutError(f"not within {seconds:g} s: {what}")


def gateway_process() -> psutil.Process:
    """The one gateway's process below this one, by the title Ray gives it."""
    found = [p for p in psutil.Process().children(recursive=True) if ":Gateway" in "".join(_command(p))]
    if len(found) != 1:
        raise RuntimeError(f"{len(found)} gateway processes, expected 1")
    return found[0]


def _command(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:  # it ended in between
        return []


def metrics(key: str | None = None) -> str:
    """The gateway's page of metrics."""
    request = urllib.request.Request(f"{h.URL}/metrics")
    if key:
        request.add_header("authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


def metric(page: str, name: str, labels: str = "") -> float:
    """Sum of one metric's samples whose labels contain ``labels``; 0 when there is none."""
    found = re.findall(rf"^{name}(\{{[^}}]*\}})? ([0-9.eE+-]+)$", page, re.MULTILINE)
    return sum(float(value) for label, value in found if labels in label)


def quantile_ms(before: str, after: str, name: str, q: float) -> float:
    """Quantile ``q`` of a histogram, of what was added between two pages: its bucket's upper bound, in ms."""
    counts: dict[float, float] = {}
    for page, sign in ((before, -1), (after, 1)):
        for label, value in re.findall(
            rf'^{name}_bucket\{{[^}}]*le="([^"]+)"[^}}]*\}} ([0-9.e+-]+)$', page, re.MULTILINE
        ):
            counts[float(label)] = counts.get(float(label), 0.0) + sign * float(value)
    total = counts.get(float("inf"), 0.0)
    return next((le * 1e3 for le, n in sorted(counts.items()) if total and n >= q * total), float("nan"))


@dataclass
class Memory:
    """Resident memory of one process while it is watched, in MiB, by second."""

    process: psutil.Process
    every_s: float = 1.0
    samples: list[tuple[float, float]] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; inside an event loop."""
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            self.samples.append((time.perf_counter(), self.process.memory_info().rss / 2**20))
            await asyncio.sleep(self.every_s)

    async def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def between(self, begin_s: float, end_s: float) -> list[float]:
        """Samples taken in this time."""
        return [mib for at, mib in self.samples if begin_s <= at <= end_s]


WORDS = (
    "time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "state", "family",
    "group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system", "question", "work",
)  # fmt: skip


def prompt(rng: random.Random, tokens: int) -> str:
    """A prompt nobody sent before, of about ``tokens`` tokens of the emulated engine (four bytes each)."""
    words = [f"{rng.getrandbits(48):012x}"]
    while (size := sum(map(len, words)) + len(words)) < tokens * 4:
        words.extend(rng.choices(WORDS, k=max(1, (tokens * 4 - size) // 8)))
    return " ".join(words)[: tokens * 4]
