"""Text as a model wrote it → what it said and what it called, piece by piece.

What comes out depends on the text alone, never on how it was cut: held back is what could still become a call, and
given out is what can change no more. So a live stream, a replay and a whole answer say the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from jitney.call_formats import CALL_FORMATS, CallTerms
from jitney.call_text import Braces, call_of
from jitney.tool_calls import Argued, Called, Piece, Said, ToolCall, call_id

_MAX_HEAD_CHARS: Final = 512
"""A call that begins in the usual order says its name within these, and its arguments are then given out as they come.
Any other is given out as a whole."""

_HEAD: Final = re.compile(r'\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_FIRST_KEY: Final = re.compile(r'\{\s*(?:"([^"\\]*)"|[^\s"])')
_KEYS: Final = frozenset({"name", "arguments", "parameters", "id", "type", "function"})


def read_answer(terms: CallTerms, job_id: str, choice: int, text: str) -> tuple[str | None, tuple[ToolCall, ...]]:
    """What a whole answer says, and what it calls; None where it says nothing but calls."""
    reader = CallReader(terms)
    said, calls = list[str](), list[tuple[str, list[str]]]()
    for piece in [*reader.feed(text), *reader.end()]:
        if isinstance(piece, Said):
            said.append(piece.text)
        elif isinstance(piece, Called):
            calls.append((piece.name, []))
        else:
            calls[piece.index][1].append(piece.text)
    told = tuple(
        ToolCall(call_id(job_id, choice, index), name, "".join(arguments))
        for index, (name, arguments) in enumerate(calls)
    )
    return "".join(said) or (None if told else ""), told


class CallReader:
    """Of one choice. `feed` it the text in any pieces, then `end` it."""

    def __init__(self, terms: CallTerms) -> None:
        self._form = CALL_FORMATS[terms.format]
        self._max_calls = terms.max_calls
        self._num_calls = 0
        self._pending = ""
        self._call = ""  # what was read of a call that is not certain to be one
        self._braces = Braces()
        self._state: Callable[[], bool] = self._in_text if self._form.marker else self._at_start
        self._out: list[Piece] = []

    @property
    def num_calls(self) -> int:
        """Calls told so far."""
        return self._num_calls if self._max_calls is None else min(self._num_calls, self._max_calls)

    def feed(self, text: str) -> list[Piece]:
        """What `text` adds."""
        self._pending += text
        while self._state():
            pass
        out, self._out = self._out, []
        return out

    def end(self) -> list[Piece]:
        """What was held back: nothing follows that could make a call of it."""
        rest, self._call, self._pending = self._call + self._pending, "", ""
        is_of_a_call = self._state in (self._in_arguments, self._in_rest, self._after_call)
        is_space_behind = bool(self._num_calls) and not rest.strip()
        return [] if not rest or is_of_a_call or is_space_behind else [Said(rest)]

    # States. Each takes what it is sure of from `_pending`, and is True if another state may go on at once.

    def _in_text(self) -> bool:
        """Words, until the marker. White space before it belongs to it."""
        marker, text = self._form.marker, self._pending
        found = text.find(marker)
        if found >= 0:
            words, behind = len(text[:found].rstrip()), found + len(marker)
            self._say(text[:words])
            self._call, self._pending = text[words:behind], text[behind:]
            return self._go(self._in_call if not self._form.is_list else self._in_list)
        words = len(text[: len(text) - _overlap(text, marker)].rstrip())
        self._say(text[:words])
        self._pending = text[words:]
        return False

    def _at_start(self) -> bool:
        """Of an answer that is either calls or words."""
        shown = self._pending.lstrip()
        if not shown:
            return False
        if shown[0] != ("[" if self._form.is_list else "{"):
            return self._go(self._in_words)
        return self._go(self._in_list if self._form.is_list else self._in_call)

    def _in_words(self) -> bool:
        """Nothing can be a call any more."""
        self._say(self._pending)
        self._pending = ""
        return False

    def _in_list(self) -> bool:
        """Before a list's first call."""
        shown = self._pending.lstrip()
        if shown[:1] == "[":
            self._take(len(self._pending) - len(shown) + 1)
            return self._go(self._in_call)
        return bool(shown) and self._give_up()

    def _in_call(self) -> bool:
        """Before the name of a call is known."""
        shown = self._pending.lstrip()
        if not shown:
            return False
        if shown[0] != "{":
            return self._give_up()
        self._take(len(self._pending) - len(shown))
        head = _HEAD.match(shown[:_MAX_HEAD_CHARS])
        if head is not None:
            self._begin_call(head[1])
            self._pending = shown[head.end() :]
            self._braces = Braces()
            return self._go(self._in_arguments)
        first = _FIRST_KEY.match(shown)
        if first is not None and first[1] not in _KEYS:
            return self._give_up()
        end = self._braces.find_end(shown)
        if end is None:
            return False
        return self._whole_call(shown, end)

    def _whole_call(self, shown: str, end: int) -> bool:
        """A call in an order of its own, all of it at hand."""
        found = call_of(shown[:end], needs_arguments=not self._form.marker)
        if found is None:
            return self._give_up()
        name, arguments = found
        self._begin_call(name)
        self._argue(arguments)
        self._pending = shown[end:]
        return self._close_call()

    def _in_arguments(self) -> bool:
        """The arguments' object, given out as it comes."""
        end = self._braces.find_end(self._pending)
        piece = self._pending if end is None else self._pending[:end]
        self._argue(piece)
        self._pending = self._pending[len(piece) :]
        self._braces.forget(len(piece))
        if end is None:
            return False
        self._braces = Braces(depth=1)
        return self._go(self._in_rest)

    def _in_rest(self) -> bool:
        """What a call says after its arguments: an id, for one, and the brace that ends it."""
        end = self._braces.find_end(self._pending)
        if end is None:
            return False
        self._pending = self._pending[end:]
        return self._close_call()

    def _after_call(self) -> bool:
        """Another call, or the end of them. White space between is nobody's."""
        shown = self._pending.lstrip()
        if self._form.is_list:
            more, last = shown[:1] == ",", shown[:1] == "]"
            if more:
                self._call, self._pending = self._pending[: len(self._pending) - len(shown) + 1], shown[1:]
                return self._go(self._in_call)
            if last:
                self._pending = shown[1:]
                return self._go(self._in_text if self._form.marker else self._in_words_after)
        elif self._form.marker:
            closing = self._form.closing.strip()
            if shown.startswith(closing):
                self._pending = shown[len(closing) :]
                return self._go(self._in_text)
            if closing.startswith(shown):
                return False
        elif shown[:1] == ";":
            self._call, self._pending = self._pending[: len(self._pending) - len(shown) + 1], shown[1:]
            return self._go(self._in_call)
        elif shown[:1] == "{":
            return self._go(self._in_call)
        return bool(shown) and self._go(self._in_text if self._form.marker else self._in_words_after)

    def _in_words_after(self) -> bool:
        """Words after the calls of a form without a marker, but for white space at the end."""
        words = len(self._pending.rstrip())
        self._say(self._pending[:words])
        self._pending = self._pending[words:]
        return False

    # What the states do.

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _say(self, text: str) -> None:
        if text:
            self._out.append(Said(text))

    def _take(self, count: int) -> None:
        """So much of what is pending belongs to a call, if it becomes one."""
        self._call, self._pending = self._call + self._pending[:count], self._pending[count:]

    def _give_up(self) -> bool:
        """It is no call: what was held back are words."""
        self._say(self._call)
        self._call, self._braces = "", Braces()
        return self._go(self._in_text if self._form.marker else self._in_words)

    def _begin_call(self, name: str) -> None:
        self._call = ""
        self._num_calls += 1
        if self._is_told:
            self._out.append(Called(self._num_calls - 1, name))

    def _argue(self, text: str) -> None:
        if text and self._is_told:
            self._out.append(Argued(self._num_calls - 1, text))

    def _close_call(self) -> bool:
        self._braces = Braces()
        return self._go(self._after_call)

    @property
    def _is_told(self) -> bool:
        """False for a call beyond those that count."""
        return self._max_calls is None or self._num_calls <= self._max_calls


def _overlap(text: str, marker: str) -> int:
    """How many characters at the end of `text` could be the beginning of the marker."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)
