"""Token ids → the text that may be shown, one token at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from jitney_worker.text.stops import StopStrings
from jitney_worker.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Spelled:
    """What one token added. stopped: a stop string is complete; nothing follows."""

    text: str
    stopped: bool = False


class Speller:
    """One choice of one job. Kept by one thread; its state is a function of the ids pushed so far.

    Held back is only what may still change: the bytes of an unfinished character, and a tail that is the
    beginning of a stop string. What a stop string matched is never shown, nor is a special token, nor one
    of `end_ids` (tokens that end the answer). So, up to a stop string:

        texts of all pushes + flush() == tokenizer.decode(ids)
    """

    def __init__(self, tokenizer: Tokenizer, stop: Iterable[str] = (), end_ids: Iterable[int] = ()) -> None:
        self._stream = tokenizer.pieces.stream()
        self._stops = StopStrings(stop)
        self._end_ids = frozenset(end_ids)
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """True once a stop string is complete."""
        return self._stopped

    def push(self, token_id: int) -> Spelled:
        """Go on by one token."""
        assert not self._stopped, "the text has ended with a stop string"
        fresh = "" if token_id in self._end_ids else self._stream.push(token_id)
        if not self._stops:
            return Spelled(fresh)
        match = self._stops.feed(fresh)
        text = self._held + fresh
        if match is not None:
            self._stopped, self._held = True, ""
            return Spelled(text[: len(text) - len(fresh) + match.end - match.length], stopped=True)
        cut = len(text) - self._stops.held
        self._held = text[cut:]
        return Spelled(text[:cut])

    def flush(self) -> str:
        """What was held back, when the answer ends otherwise than by a stop string; then nothing more.

        An unfinished character becomes what `decode` makes of it: U+FFFD. Stop strings are not looked
        for in it. After a stop string there is nothing to flush.
        """
        if self._stopped:
            return ""
        text, self._held = self._held + self._stream.flush(), ""
        return text

    def replay(self, token_ids: Iterable[int]) -> str:
        """Push the ids of earlier attempts: the text that they have shown. Ends at a stop string."""
        shown = []
        for token_id in token_ids:
            if self._stopped:
                break
            shown.append(self.push(token_id).text)
        return "".join(shown)
