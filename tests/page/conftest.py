"""A browser, and the stack whose page it looks at."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from tests.browsers import chromium, open_page
from tests.page.stage import Stage, staged

__all__ = ["chromium", "open_page"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    """Four seats and eight blocks: two jobs of some length do not fit beside each other."""
    async with staged(tmp_path_factory.mktemp("stage"), num_blocks=8) as running:
        yield running
