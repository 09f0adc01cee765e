"""What no log may hold, taken out of every line at the one place that all of them pass: words, keys, passwords.

Whoever logs should not have put it there. This is for what came in by way of an error's text, or by mistake.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from typing import Any, Final

WITHHELD: Final = "[withheld]"

MAX_CHARS: Final = 1_000
"""Of one value. An error may quote what somebody sent; a traceback may not be cut, because its end says what it was."""

SECRET_FIELDS: Final = frozenset(
    (
        *("prompt", "messages", "content", "text", "texts", "body", "input", "output", "answer", "embedding"),
        *("token_ids", "prompt_ids", "api_key", "authorization", "password", "secret", "headers"),
    )
)
"""Fields that are never shown, whatever they hold."""

LOOKED_AT: Final = 8 * MAX_CHARS
"""Of a value that is cut. What is shown may begin a password, and where that ends says that it is one."""

# All of them of bounded length: somebody else may have written the text, and no other pattern is done with it in time.
_PASSWORD: Final = re.compile(
    r"(?P<before>\b[a-z][a-z0-9+.-]{0,31}://[^\s/:@'\"]{0,256}:)(?!\d+[/?#])[^\s'\"]{1,4096}(?=@)", re.IGNORECASE
)
_PARAMETER: Final = re.compile(
    r"(?P<before>[?&](?:[\w.-]{0,32}(?:password|token|secret|signature|credential|api[_-]?key)|sig|key)=)[^\s&#'\"]+",
    re.IGNORECASE,
)
_API_KEY: Final = re.compile(r"\bjitney_[A-Za-z0-9_-]{43}\b|(?<=Bearer )[^\s'\"]+", re.IGNORECASE)


def redacted(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A processor of structlog's: the event as it may be written down."""
    for name, value in event.items():
        if name in SECRET_FIELDS:
            event[name] = WITHHELD
        elif name == "exception":
            event[name] = without_secrets(value)
        elif name != "event":
            event[name] = _plain(value)
    return event


def without_secrets(text: str) -> str:
    """The text without passwords in addresses, in their queries too, and without API keys."""
    for pattern in (_PASSWORD, _PARAMETER):
        text = pattern.sub(r"\g<before>***", text)
    return _API_KEY.sub("***", text)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        text = without_secrets(value[:LOOKED_AT])
        return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}… ({len(value)} characters)"
    if isinstance(value, dict):
        return {name: WITHHELD if name in SECRET_FIELDS else _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float) else _plain(str(value))
