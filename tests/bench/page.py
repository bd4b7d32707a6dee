"""The page at /dashboard with 500 replicas: ``TIDEGATE_CHROMIUM=/usr/bin/chromium python -m tests.bench.page``.

Prints bytes and time of one overview in the controller; how long the page takes from navigation to the first row; and,
while everybody reports each second, how long the browser's main thread is busy with one update and between two frames.
The browser and everything it talks to share the machine.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from typing import Any

from deployments.dashboard_page.serving import load_page
from tests import browser
from tests.page_stand import Stand, standing

REPLICAS = 500
SECONDS = 20
FRAMES = """
window.frames_ms = [];
(() => { let last = performance.now();
  const step = (now) => { window.frames_ms.push(now - last); last = now; requestAnimationFrame(step); };
  requestAnimationFrame(step); })()
"""


def overview_cost(stand: Stand) -> tuple[int, float]:
    """Bytes of one overview, and the controller's CPU for it in ms: the median of 20, a tick before each."""
    times = []
    for _ in range(20):
        stand.report()
        began = time.process_time()
        found = stand.controller.overview()
        times.append((time.process_time() - began) * 1_000)
    return len(found), statistics.median(times)


async def measure() -> dict[str, Any]:
    """All figures."""
    async with standing(REPLICAS) as stand, browser.running() as chrome:
        size, cpu_ms = overview_cost(stand)
        tab = await chrome.tab()
        began = time.perf_counter()
        await tab.look(stand.url + "/dashboard", 1280)
        await tab.until("document.querySelectorAll('#replicas tbody tr').length > 0")
        shown_s = time.perf_counter() - began
        loaded_ms = await tab.js("performance.getEntriesByType('navigation')[0].loadEventEnd")
        await tab.js(FRAMES)
        for _ in range(SECONDS):
            await asyncio.sleep(1)
            stand.report()
        shows = await tab.js("performance.getEntriesByName('show').map(m => m.duration)")
        frames = await tab.js("window.frames_ms")
        heap = await tab.js("performance.memory.usedJSHeapSize")
    return {
        "page, bytes (as sent, packed)": f"{len(load_page().body):,} ({len(load_page().packed):,})",
        "overview, bytes": f"{size:,}",
        "overview, CPU of the controller, ms": f"{cpu_ms:.1f}",
        "load event after navigation, ms": f"{loaded_ms:.0f}",
        "first rows after navigation, ms": f"{shown_s * 1_000:.0f}",
        f"one update, ms (median, longest of {len(shows)})": f"{statistics.median(shows):.1f}, {max(shows):.1f}",
        f"between frames, ms (median, p99, longest of {len(frames):,})": ", ".join(
            f"{value:.1f}"
            for value in (statistics.median(frames), sorted(frames)[len(frames) * 99 // 100], max(frames))
        ),
        "JavaScript heap, MB": f"{heap / 1e6:.1f}",
    }


def main() -> None:
    """Print the table."""
    if browser.CHROMIUM is None:
        sys.exit("TIDEGATE_CHROMIUM must name a Chromium")
    print(f"{REPLICAS} replicas")
    for name, value in asyncio.run(measure()).items():
        print(f"  {name:<62}{value:>24}")


if __name__ == "__main__":
    main()
