"""Finding stop strings in text that arrives in pieces.

The rule is about characters, not tokens, so that the same text stops at the same place however it was
cut: the stop string that is complete first ends the text; of several complete at the same character,
the longest. Each string has its own automaton (Knuth, Morris and Pratt 1977): constant work for each
character and string, whatever a user puts in.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """end: characters of the piece up to and with the last one of the match. length: of the stop string."""

    end: int
    length: int


class StopStrings:
    """The state of one text. `held` = length of its longest tail that could still become a stop string."""

    def __init__(self, strings: Iterable[str]) -> None:
        self._strings = [_Progress(string) for string in dict.fromkeys(strings)]
        self._first_characters = frozenset(string.first for string in self._strings)
        self.held = 0

    def __bool__(self) -> bool:
        return bool(self._strings)

    def feed(self, piece: str) -> Match | None:
        """Go on by `piece`; the first match in it, if there is one, after which nothing may be fed."""
        # Nearly every piece of nearly every answer: nothing is under way, and nothing begins here.
        if not self.held and self._first_characters.isdisjoint(piece):
            return None
        for position, character in enumerate(piece):
            length = 0
            for string in self._strings:
                if string.feed(character):
                    length = max(length, string.matched)
            if length:
                return Match(position + 1, length)
        self.held = max(string.matched for string in self._strings)
        return None

    def pass_over(self, piece: str) -> None:
        """Go on by `piece`, in which nothing that is complete counts; what begins in it may count later."""
        for character in piece:
            for string in self._strings:
                if string.feed(character):
                    string.pass_over()
        self.held = max((string.matched for string in self._strings), default=0)


class _Progress:
    """How much of one string the text ends with."""

    __slots__ = ("_borders", "_string", "first", "matched")

    def __init__(self, string: str) -> None:
        assert string, "an empty stop string would stop everything"
        self._string, self.first = string, string[0]
        self._borders = _borders(string)
        self.matched = 0

    def feed(self, character: str) -> bool:
        """True if the string is complete with this character."""
        matched = self.matched
        while matched and self._string[matched] != character:
            matched = self._borders[matched - 1]
        self.matched = matched + (self._string[matched] == character)
        return self.matched == len(self._string)

    def pass_over(self) -> None:
        """After a match that does not count: the text may still end with the beginning of another."""
        self.matched = self._borders[-1]


def _borders(string: str) -> list[int]:
    """For each prefix: the length of its longest proper part that both begins and ends it."""
    borders, length = [0], 0
    for character in string[1:]:
        while length and string[length] != character:
            length = borders[length - 1]
        length += string[length] == character
        borders.append(length)
    return borders
