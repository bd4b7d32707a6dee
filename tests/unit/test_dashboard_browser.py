"""The page in a real browser, over a gateway without Ray: what is shown and can be done, and that everybody can use it.

Needs Chromium, and the last test axe-core (``TIDEGATE_AXE``: its ``axe.min.js``); ``make page`` has both.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from deployments.keys import SCOPES, new_key
from tests import browser
from tests.browser import Tab
from tests.page_stand import Stand, standing

pytestmark = [
    pytest.mark.skipif(browser.CHROMIUM is None, reason="needs a browser, named by TIDEGATE_CHROMIUM: make page"),
    pytest.mark.timeout(120),
]
AXE = os.environ.get("TIDEGATE_AXE")
KEY, RECORD = new_key("acme", list(SCOPES), 0)
READER_KEY, READER = new_key("acme", ["control:read"], 0)

Looks = tuple[Stand, Tab]


@asynccontextmanager
async def looking(replicas: int, *records: Any, width: int = 1280, path: str = "/dashboard") -> AsyncIterator[Looks]:
    """A stand that reports twice, and a browser at its page. What the page complains about fails the test."""
    async with standing(replicas, *records) as stand, browser.running() as chrome:
        stand.report()
        tab = await chrome.tab()
        await tab.look(stand.url + path, width)
        yield stand, tab
        assert {url for url in tab.requested if not url.startswith((stand.url, "data:"))} == set()


async def texts(tab: Tab, selector: str) -> list[str]:
    found: list[str] = await tab.js(f"[...document.querySelectorAll({selector!r})].map(n => n.innerText.trim())")
    return found


async def test_it_shows_the_fleet_and_follows_it() -> None:
    async with looking(8) as (stand, tab):
        await tab.until("document.querySelectorAll('#replicas tbody tr').length === 8")
        stand.decide()
        await tab.until(
            "document.querySelector('#decisions .line')?.innerText.includes('step_tokens_max 2,048\u00a0\u2192 832')"
        )
        assert "keep gaps within 190 ms" in (await texts(tab, "#decisions li"))[0]
        rows = {row.split()[0]: row for row in await texts(tab, "#replicas tbody tr")}
        assert "left alone" in rows["replica-00002"]
        assert "stuck" in rows["replica-00006"]
        assert "256 + 40 wait" in rows["replica-00001"]
        assert "97.5%" in rows["replica-00001"]
        assert (await texts(tab, "#tiles dd.big"))[0] == "8"
        assert len(await texts(tab, "#gateways tbody tr")) == 2
        assert tab.problems == []


async def test_nothing_is_shown_before_a_key_and_the_key_stays_in_the_tab() -> None:
    async with looking(4, RECORD) as (_, tab):
        await tab.until("!document.getElementById('ask-key').hidden")
        assert await tab.js("document.getElementById('fleet').hidden")
        assert await tab.js("document.activeElement.id") == "key"
        await tab.send("Input.insertText", text="tg-wrong-key")
        await tab.press("Enter", 13)
        await tab.until("document.getElementById('ask-key-why').innerText.includes('not valid')")
        await tab.js("document.getElementById('key').focus()")
        await tab.send("Input.insertText", text=KEY)
        await tab.press("Enter", 13)
        await tab.until("document.querySelectorAll('#replicas tbody tr').length === 4")
        assert await tab.js("[localStorage.length, document.cookie]") == [0, ""]
        assert KEY not in "".join(tab.requested)
        await tab.js("document.getElementById('forget').click()")
        await tab.until("document.readyState === 'complete' && !document.getElementById('ask-key')?.hidden")
        assert await tab.js("sessionStorage.length") == 0


async def test_an_override_is_set_after_a_question_and_taken_back() -> None:
    async with looking(4) as (stand, tab):
        await tab.until("document.querySelectorAll('#o-knob option').length > 5")
        await tab.js("""
            document.querySelector('#override-form').closest('details').open = true;
            document.getElementById('o-knob').value = 'load_bound';
            document.getElementById('o-value').value = '1.5';
            document.getElementById('o-why').value = 'launch';
            document.querySelector('#override-form button').click()""")
        await tab.until("document.getElementById('confirm').open")
        assert stand.controller.desk.overrides() == []
        await tab.press("Escape", 27)
        await tab.until("!document.getElementById('confirm').open")
        assert stand.controller.desk.overrides() == []
        await tab.js("document.querySelector('#override-form button').click()")
        await tab.until("document.getElementById('confirm').open")
        await tab.js("document.getElementById('confirm-yes').click()")
        await tab.until("document.querySelector('#overrides li code')?.innerText === 'load_bound = 1.5'")
        held = stand.controller.desk.overrides()[0]
        assert (held["knob"], held["value"], held["why"]) == ("load_bound", 1.5, "launch")
        await tab.js("document.querySelector('#overrides button').click()")
        await tab.until("document.getElementById('confirm').open")
        await tab.js("document.getElementById('confirm-yes').click()")
        await tab.until("document.querySelector('#overrides').innerText.includes('None is in force')")
        assert stand.controller.desk.overrides() == []
        assert tab.problems == []


async def test_shadow_mode_is_switched_after_a_question_and_refused_to_a_key_that_may_only_read() -> None:
    async with looking(4, READER, RECORD) as (stand, tab):

        async def use(key: str) -> None:
            await tab.js(f"sessionStorage.setItem('tidegate-key', '{key}'); location.reload()")
            await tab.until("document.querySelectorAll('#knobs tbody tr').length > 5")

        await tab.until("!document.getElementById('ask-key').hidden")
        await use(READER_KEY)
        await tab.js("document.getElementById('shadow-all').click()")
        await tab.js("document.getElementById('confirm-yes').click()")
        await tab.until("document.getElementById('confirm-text').innerText.includes('control:write')")
        assert stand.controller.desk.overrides() == []
        await tab.press("Escape", 27)
        await use(KEY)
        await tab.js("document.getElementById('shadow-all').click()")
        await tab.js("document.getElementById('confirm-yes').click()")
        await tab.until("document.getElementById('mode').innerText.startsWith('shadow')")
        assert all(row["mode"] == "shadow" for row in stand.controller.desk.shadow())


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_is_answered_and_its_way_is_told(stream: bool) -> None:
    async with looking(1, path="/dashboard#try") as (_, tab):
        await tab.until("document.querySelectorAll('#t-model option').length === 1")
        await tab.js(f"document.getElementById('t-stream').checked = {str(stream).lower()}")
        await tab.js("document.getElementById('t-tokens').value = 40; document.getElementById('t-send').click()")
        await tab.until("document.getElementById('t-status').innerText.startsWith('Done')")
        assert len((await texts(tab, "#answer"))[0]) > 20
        await tab.until("document.querySelectorAll('#went dt').length > 8")
        way = (await texts(tab, "#went"))[0]
        for told in ("replica-00000 (ok)", "only_replica", "let in at once", "40 output", "succeeded: ok", "engine"):
            assert told in way
        assert tab.problems == []


async def test_an_answer_can_be_stopped_and_an_error_is_told_in_the_gateways_words() -> None:
    async with looking(1, path="/dashboard#try") as (_, tab):
        await tab.until("document.querySelectorAll('#t-model option').length === 1")
        await tab.js("document.getElementById('t-tokens').value = 2000; document.getElementById('t-send').click()")
        await tab.until("document.getElementById('answer').innerText.length > 5")
        await tab.js("document.getElementById('t-stop').click()")
        await tab.until("document.getElementById('t-status').innerText === 'Stopped.'")
        await tab.until("document.getElementById('went').innerText.includes('cancelled')")
        await tab.js("document.getElementById('t-tokens').value = 999999; document.getElementById('t-send').click()")
        await tab.until("document.getElementById('t-status').innerText.startsWith('It ended with an error: ')")


async def test_all_of_it_can_be_reached_with_the_keyboard() -> None:
    async with looking(4) as (_, tab):
        await tab.until("document.querySelectorAll('#knobs button').length > 5")
        wanted = await tab.js("""
            [...document.querySelectorAll('a, button, input, select, textarea, summary, [tabindex="0"]')]
                .filter(n => !n.disabled && n.checkVisibility() && n.tabIndex >= 0).length""")
        reached = set()
        for _ in range(wanted + 2):
            await tab.press("Tab", 9)
            where = await tab.js("""(() => { const n = document.activeElement;
                const outline = getComputedStyle(n).outlineStyle;
                return [[...document.querySelectorAll('*')].indexOf(n), n.tagName, outline]; })()""")
            if where[1] != "BODY":
                assert where[2] != "none", where
                reached.add(where[0])
        assert len(reached) >= wanted
        await tab.js("document.getElementById('tab-fleet').focus()")
        await tab.press("ArrowRight", 39)
        assert await tab.js("document.activeElement.id") == "tab-try"
        assert not await tab.js("document.getElementById('try').hidden")


@pytest.mark.parametrize("width", [1280, 390])
async def test_it_fits_the_screen_and_large_fleets_are_shown_in_pages(width: int) -> None:
    async with looking(120, width=width) as (_, tab):
        await tab.until("document.querySelectorAll('#heat i').length === 120")
        shown = 25 if width == 1280 else 10
        assert await tab.js("document.querySelectorAll('#replicas tbody tr').length") == shown
        assert await tab.js("document.documentElement.scrollWidth") <= width
        await tab.js("document.getElementById('page-on').click()")
        await tab.until(f"document.getElementById('page-words').innerText === '{shown + 1} to {2 * shown} of 120'")
        await tab.js("""const find = document.getElementById('find');
            find.value = 'stuck'; find.dispatchEvent(new Event('input'))""")
        assert len(await texts(tab, "#replicas tbody tr")) == 2
        assert tab.problems == []


async def violations(tab: Tab) -> list[str]:
    """What axe finds in the page as it stands."""
    assert AXE is not None
    axe = await asyncio.to_thread(Path(AXE).read_text, encoding="utf-8")
    found: list[str] = await tab.js(
        axe
        + """; axe.run(document, {resultTypes: ['violations']}).then(
        r => r.violations.map(v => v.id + ': ' + v.nodes.map(n => n.target + n.failureSummary).slice(0, 3)))"""
    )
    return found


needs_axe = pytest.mark.skipif(AXE is None, reason="needs axe-core, named by TIDEGATE_AXE: make page")


@needs_axe
@pytest.mark.parametrize("dark", [False, True])
async def test_axe_finds_nothing(dark: bool) -> None:
    async with looking(40, RECORD) as (stand, tab):
        await tab.send("Page.setBypassCSP", enabled=True)

        async def check(width: int, ready: str) -> None:
            await tab.look("about:blank", width)
            await tab.look(stand.url + "/dashboard", width, dark)
            await tab.until(ready)
            assert await violations(tab) == []

        await check(1280, "!document.getElementById('ask-key').hidden")
        await tab.js(f"sessionStorage.setItem('tidegate-key', '{KEY}')")
        stand.decide()
        for width in (1280, 390):
            await check(width, "document.querySelectorAll('#replicas tbody tr').length > 5")


@needs_axe
@pytest.mark.parametrize("dark", [False, True])
async def test_axe_finds_nothing_where_a_prompt_is_tried(dark: bool) -> None:
    """Before it is asked, with its answer and its way, and with an error; wide and narrow."""
    async with looking(1) as (stand, tab):
        await tab.send("Page.setBypassCSP", enabled=True)
        for width in (1280, 390):
            await tab.look("about:blank", width)
            await tab.look(stand.url + "/dashboard#try", width, dark)
            await tab.until("document.querySelectorAll('#t-model option').length === 1")
            assert await violations(tab) == []
            await tab.js("document.getElementById('t-tokens').value = 40; document.getElementById('t-send').click()")
            await tab.until("document.querySelectorAll('#went dt').length > 8")
            assert await violations(tab) == []
            await tab.js(
                "document.getElementById('t-tokens').value = 999999; document.getElementById('t-send').click()"
            )
            await tab.until("document.getElementById('t-status').innerText.startsWith('It ended with an error: ')")
            assert await violations(tab) == []
