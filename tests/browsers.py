"""A headless Chromium for tests of pages: the distribution's, driven by Playwright; and axe, which looks for barriers.

A directory that has such tests takes the fixtures into its conftest: `from tests.browsers import chromium, open_page`.
Its tests run in the module's event loop: `pytestmark = pytest.mark.asyncio(loop_scope="module")`.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Literal

import pytest
import pytest_asyncio
from playwright.async_api import Browser, Page, async_playwright

AXE = Path(__file__).parent / "clients_js" / "node_modules" / "axe-core" / "axe.min.js"
DESKTOP, PHONE = (1280, 900), (390, 844)
SERIOUS = ("serious", "critical")

OpenPage = Callable[..., AbstractAsyncContextManager[Page]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chromium() -> AsyncIterator[Browser]:
    """One browser for a module. As root it needs --no-sandbox, and CI is root."""
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium here: apt-get install chromium")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        await browser.close()


@pytest.fixture
def open_page(chromium: Browser) -> OpenPage:
    """`async with open_page(url, size=PHONE, scheme="dark") as page:` fails at the end if the page complained, or
    asked anybody but its own origin for anything.
    """

    @contextlib.asynccontextmanager
    async def opened(
        url: str,
        *,
        size: tuple[int, int] = DESKTOP,
        scheme: Literal["light", "dark"] = "light",
        calm: bool = False,
    ) -> AsyncIterator[Page]:
        page = await chromium.new_page(
            viewport={"width": size[0], "height": size[1]},
            color_scheme=scheme,
            reduced_motion="reduce" if calm else "no-preference",
        )
        complaints: list[str] = []
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: complaints.append(line.text) if line.type in ("error", "warning") else None)
        page.on("request", lambda asked: complaints.append(asked.url) if not _is_own(asked.url, url) else None)
        await page.goto(url)
        yield page
        await page.close()
        assert complaints == []

    return opened


def _is_own(asked: str, url: str) -> bool:
    """A page from a file may ask for nothing but itself."""
    if url.startswith("file:"):
        return asked.split("#")[0] == url
    return asked.split("/")[:3] == url.split("/")[:3]


async def barriers(page: Page) -> list[str]:
    """What axe finds that keeps people out: `rule: elements`. Skips where the package is not installed."""
    if not AXE.is_file():
        pytest.skip("no axe-core in tests/clients_js: npm ci --prefix tests/clients_js")
    # Not as a script of the page: one with a policy of its own would refuse it.
    await page.evaluate(AXE.read_text(encoding="utf-8"))
    found: dict[str, Any] = await page.evaluate("axe.run()")
    return [
        f"{one['id']}: {[node['target'] for node in one['nodes']][:5]}"
        for one in found["violations"]
        if one["impact"] in SERIOUS
    ]
