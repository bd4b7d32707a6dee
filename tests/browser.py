"""A Chromium for tests of the page, spoken to over its DevTools protocol: no package of its own is needed for that.

``TIDEGATE_CHROMIUM`` names the program, and ``make page`` sets it; without it tests that need a browser are skipped.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

CHROMIUM = os.environ.get("TIDEGATE_CHROMIUM")
"""Path of the browser; ``None``: there is none to be used."""
WAIT_S = 60.0
"""Longest wait for anything, far above what it takes."""
FLAGS = (
    "--headless=new", "--remote-debugging-port=0", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--mute-audio", "--force-color-profile=srgb",
)  # fmt: skip


class Tab:
    """One page. ``problems``: what its scripts raised and what its console or its policy complained about."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self.session = session
        self.problems: list[str] = []
        self.requested: list[str] = []
        """Every URL it asked for."""

    async def send(self, method: str, **params: Any) -> Any:
        """One command of the protocol."""
        return await self._browser.send(method, params, self.session)

    async def js(self, expression: str) -> Any:
        """The value of ``expression``; a promise is awaited."""
        answer = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise AssertionError(
                f"{expression[:200]}: {details.get('exception', {}).get('description', details['text'])}"
            )
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until ``expression`` is true."""
        value = None
        for _ in range(round(WAIT_S / 0.05)):
            value = await self.js(expression)
            if value:
                return value
            await asyncio.sleep(0.05)
        raise AssertionError(f"never true: {expression}; last: {value!r}; problems: {self.problems}")

    async def look(self, url: str, width: int, dark: bool = False) -> None:
        """Go to ``url`` on a screen of ``width`` pixels."""
        phone = width < 600
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=844 if phone else 900, deviceScaleFactor=1, mobile=phone,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])
        await self.send("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def press(self, key: str, code: int = 0) -> None:
        """Press and release ``key``, such as Tab."""
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    async def shot(self, path: Path) -> None:
        """The whole page as a PNG."""
        answer = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(answer["data"]))

    def heard(self, method: str, params: Any) -> None:
        """Keep what is worth knowing of an event."""
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])


class Browser:
    """One running Chromium; made by :func:`running`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._tabs: dict[str, Tab] = {}
        self._count = 0

    async def send(self, method: str, params: dict[str, Any], session: str | None = None) -> Any:
        """One command; ``session`` names the tab."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        answer = self._answers[self._count] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(message)
        return await asyncio.wait_for(answer, WAIT_S)

    async def read(self) -> None:
        """Hand over answers and events until the connection ends."""
        async for message in self._socket:
            found = message.json()
            if "id" in found:
                answer = self._answers.pop(found["id"])
                if "error" in found:
                    answer.set_exception(AssertionError(found["error"]["message"]))
                else:
                    answer.set_result(found["result"])
            elif (tab := self._tabs.get(found.get("sessionId", ""))) is not None:
                tab.heard(found["method"], found["params"])

    async def tab(self) -> Tab:
        """A new one."""
        target = await self.send("Target.createTarget", {"url": "about:blank"})
        attached = await self.send("Target.attachToTarget", {"targetId": target["targetId"], "flatten": True})
        tab = self._tabs[attached["sessionId"]] = Tab(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            await tab.send(f"{domain}.enable")
        return tab


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Browser]:
    """A Chromium with a profile of its own, until the block ends."""
    assert CHROMIUM is not None, "TIDEGATE_CHROMIUM names no browser"
    flags = [*FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, *flags, f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            address = await _address(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session, session.ws_connect(address, max_msg_size=0) as socket:
                browser = Browser(socket)
                reader = asyncio.create_task(browser.read())
                yield browser
                await browser.send("Browser.close", {})
                await reader
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await process.wait()


async def _address(told: Path, process: asyncio.subprocess.Process) -> str:
    for _ in range(round(WAIT_S / 0.05)):
        assert process.returncode is None, f"Chromium ended at its start with status {process.returncode}"
        lines = await asyncio.to_thread(_lines, told)
        if len(lines) == 2:
            return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
        await asyncio.sleep(0.05)
    raise AssertionError("Chromium did not say where it listens")


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split() if path.exists() else []
