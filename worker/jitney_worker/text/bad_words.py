"""Bad words as token sequences, as vLLM makes them from text."""

from __future__ import annotations

from collections.abc import Iterable

from jitney.errors import InvalidJob
from jitney_worker.text.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell each word at the start of a text, and after a space.

    The second only where it is as long and begins otherwise: in a byte-level vocabulary " word" is another token than
    "word"; where a space is a token of its own, the first sequence already covers both. Another spelling of a word,
    in other pieces or letters, is not covered: these are tokens, not texts. Raises InvalidJob for a word that has no
    tokens.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = tuple(tokenizer.encode_part(word.lstrip(), "bad_words"))
        if not bare:
            raise InvalidJob(f"bad_words holds {word!r}, which has no tokens for this model", param="bad_words")
        found[bare] = None
        spaced = tuple(tokenizer.encode_part(" " + word.lstrip(), "bad_words"))
        if len(spaced) == len(bare) and spaced[0] != bare[0]:
            found[spaced] = None
    return tuple(found)
