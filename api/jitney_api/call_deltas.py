"""The text of a chat with tools as deltas in OpenAI's shape: a function of the events, as a replay has them too."""

from __future__ import annotations

from typing import Any

import orjson

from jitney.call_formats import CallTerms
from jitney.call_reader import CallReader
from jitney.keys import JobId
from jitney.messages import Event
from jitney.tool_calls import Called, Piece, Said, call_id
from jitney_api.answers import chat_ending


class CallDeltas:
    """Of one job: a reader for each choice, fed with every event once and in order."""

    def __init__(self, job_id: JobId, terms: CallTerms) -> None:
        self._job_id = job_id
        self._terms = terms
        self._readers: dict[int, CallReader] = {}

    def of(self, event: Event) -> list[bytes]:
        """The members of `delta` that the event's text adds, one JSON object each."""
        reader = self._readers.setdefault(event.choice, CallReader(self._terms))
        pieces = reader.feed(event.text)
        if event.finish_reason is not None:
            pieces += reader.end()
        return [orjson.dumps(self._delta(event.choice, piece)) for piece in pieces]

    def ending(self, event: Event) -> str | None:
        """Why the choice ends with this event; None if it does not."""
        return chat_ending(event.finish_reason, self._readers[event.choice].num_calls)

    def _delta(self, choice: int, piece: Piece) -> dict[str, Any]:
        if isinstance(piece, Said):
            return {"content": piece.text}
        if isinstance(piece, Called):
            function = {"name": piece.name, "arguments": ""}
            told = {"id": call_id(self._job_id, choice, piece.index), "type": "function", "function": function}
            return {"tool_calls": [{"index": piece.index, **told}]}
        return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}
