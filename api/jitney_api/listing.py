"""OpenAI's shape of a page of objects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson
from starlette.responses import Response


class Listed(Protocol):
    @property
    def id(self) -> str: ...

    def object(self) -> dict[str, Any]: ...


def as_list(page: Sequence[Listed], has_more: bool) -> Response:
    """The objects; the last one's id is what the next request says as `after`.

    Written at once: the framework's own way holds everybody up for a tenth of a second over ten thousand of them.
    """
    fields = {
        "object": "list",
        "data": [one.object() for one in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": has_more,
    }
    return Response(orjson.dumps(fields), media_type="application/json")
