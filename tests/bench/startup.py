"""Fresh clone to first answer with ``make serve``, and a second start.

Clones the committed tree into a temporary folder, runs ``make serve`` there with an empty virtual environment and an
empty model cache, times it until the gateway answers a chat request, stops it with Ctrl-C (SIGINT), starts it again.
Bars: 6 minutes and 90 s. Also checks that nothing that it started is left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tests.bench import harness as h

FIRST_S_MAX, SECOND_S_MAX = 360.0, 90.0


def answers() -> bool:
    """Whether the gateway answers one chat request."""

    async def ask() -> bool:
        async with h.client_session() as session:
            result = await h.stream_chat(session, [{"role": "user", "content": "Capital of France?"}], 8, timeout_s=20)
            return not result.failed

    return asyncio.run(ask())


def serve_once(folder: Path, environment: dict[str, str], limit_s: float) -> tuple[float, bool]:
    """Run ``make serve`` until it answers, then interrupt it; return seconds and whether it ended cleanly."""
    start = time.perf_counter()
    log = (folder / "serve.log").open("ab")
    process = subprocess.Popen(
        ["make", "serve"], cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        while not answers():
            if process.poll() is not None or time.perf_counter() - start > limit_s:
                raise RuntimeError(f"make serve gave up:\n{(folder / 'serve.log').read_text()[-3000:]}")
            time.sleep(0.5)
        seconds = time.perf_counter() - start
    finally:
        os.killpg(process.pid, signal.SIGINT)
        process.wait(120)
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if str(folder) in " ".join(p.info["cmdline"] or [])]
    return seconds, not left


def main() -> int:
    """Run both starts, print the table, return the exit status."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "tidegate"
        subprocess.run(["git", "clone", "-q", str(h.ROOT), str(folder)], check=True)
        environment = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH")}
        environment["TIDEGATE_CACHE"] = str(Path(name) / "cache")
        first, clean_first = serve_once(folder, environment, 600)
        second, clean_second = serve_once(folder, environment, 300)
    h.table(
        "make serve, until the gateway answers a chat request",
        ["start", "s", "bar", "left processes behind"],
        [["fresh clone", first, FIRST_S_MAX, "no" if clean_first else "YES"],
         ["second", second, SECOND_S_MAX, "no" if clean_second else "YES"]],
    )  # fmt: skip
    ok = h.verdict(first <= FIRST_S_MAX and second <= SECOND_S_MAX, f"{first:.0f} s and {second:.0f} s")
    return 0 if h.verdict(clean_first and clean_second, "nothing left behind after Ctrl-C") and ok else 1


if __name__ == "__main__":
    sys.exit(main())
