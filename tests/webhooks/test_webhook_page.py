"""docs/WEBHOOKS.md against the code: every setting and every event stands in it."""

from __future__ import annotations

import re
from pathlib import Path

from jitney.webhooks.events import EVENT_TYPES
from jitney.webhooks.settings import WebhookSettings

PAGE = (Path(__file__).parents[2] / "docs" / "WEBHOOKS.md").read_text()


def test_every_webhook_setting_is_on_the_page_and_no_other() -> None:
    named = set(re.findall(r"`([A-Z_]+)`", PAGE[PAGE.index("| `JITNEY_WEBHOOKS__") : PAGE.index("## Ask for one")]))
    assert named == {name.upper() for name in WebhookSettings.model_fields}


def test_every_webhook_event_is_on_the_page() -> None:
    assert {name for name in EVENT_TYPES if f"`{name}`" not in PAGE} == set()
