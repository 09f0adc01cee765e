"""Token ids → the text that may be shown, one token at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from jitney_worker.text.stops import Match, StopStrings
from jitney_worker.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Spelled:
    """What one token added. stopped: a stop string is complete; nothing follows."""

    text: str
    stopped: bool = False


@dataclass(frozen=True, slots=True)
class TextOptions:
    """How a job wants its text, named as in vLLM.

    min_tokens: a stop string that is complete within so many tokens is text like any other.
    include_stop_str_in_output: what ends the answer is part of its text, a stop string as well as a token.
    skip_special_tokens: special tokens are no text.
    follows: ids of the text that the answer goes on with; empty if it is a text of its own.
    """

    min_tokens: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    follows: tuple[int, ...] = ()


PLAIN_TEXT: Final = TextOptions()


class Speller:
    """One choice of one job. Kept by one thread; its state is a function of the ids pushed so far.

    Held back is only what may still change: the bytes of an unfinished character, and a tail that is the
    beginning of a stop string. Unless `options` say otherwise, what a stop string matched is never shown, nor
    is a special token, nor one of `end_ids` (tokens that end the answer). So, up to a stop string:

        texts of all pushes + flush() == tokenizer.decode(ids)

    An answer that follows a text keeps the space before its first word besides, which `decode` drops for some
    vocabularies.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Iterable[str] = (),
        end_ids: Iterable[int] = (),
        options: TextOptions = PLAIN_TEXT,
    ) -> None:
        self._stream = tokenizer.pieces.stream(skip_special_tokens=options.skip_special_tokens)
        if options.follows:
            self._stream.follow(options.follows)
        self._stops = StopStrings(stop)
        self._end_ids = frozenset() if options.include_stop_str_in_output else frozenset(end_ids)
        self._shows_stop = options.include_stop_str_in_output
        self._num_exempt = options.min_tokens
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
        text = self._held + fresh
        match = self._match(fresh)
        if match is not None:
            self._stopped, self._held = True, ""
            end = len(text) - len(fresh) + match.end
            return Spelled(text[: end if self._shows_stop else end - match.length], stopped=True)
        cut = len(text) if self._shows_stop else len(text) - self._stops.held
        self._held = text[cut:]
        return Spelled(text[:cut])

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Go on by tokens of which none but the last can end the text."""
        if self._stops:
            return "".join([self.push(token_id).text for token_id in token_ids])
        return self._stream.push(*[token_id for token_id in token_ids if token_id not in self._end_ids])

    def _match(self, fresh: str) -> Match | None:
        if self._num_exempt > 0:
            self._num_exempt -= 1
            self._stops.pass_over(fresh)
            return None
        return self._stops.feed(fresh)

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
