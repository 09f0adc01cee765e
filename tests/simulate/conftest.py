"""A browser for the pages that `jitney simulate` writes."""

from __future__ import annotations

from tests.browsers import chromium, open_page

__all__ = ["chromium", "open_page"]
