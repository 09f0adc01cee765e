"""Structured answers: which tokens may come next, and when the answer is whole.

A structure is compiled once for this tokenizer and kept; each choice then has a state of its own, a copy of the
compiled one, which is a function of the structure and of the tokens said. Whoever goes on with a job makes it anew.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from jitney.errors import InvalidJob, JitneyError
from jitney.grammar import check, is_available, lark_of, on_deep_stack, parser_limits, reason, refuse
from jitney.structured import StructuredOutputs
from jitney_worker.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_KEPT: Final = 64
"""Compiled structures. One takes from kilobytes to a few megabytes."""

_NOTHING_FITS: Final = "NoExtension"
"""The library's word for a vocabulary that cannot spell what has to come next."""


class Structure:
    """The state of one choice. One thread at a time."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def mask(self) -> bytes:
        """Which tokens may come next: bit i % 8 of byte i // 8 for token i; none of them after a failure.

        The end tokens are among them where the answer may end.
        """
        mask = self._matcher.compute_bitmask()
        return mask if self.failure is None else bytes(len(mask))  # the library would have it end then, unfinished

    def advance(self, token_id: int) -> bool:
        """One more token; True if the answer is whole and nothing can follow."""
        self._matcher.consume_token(token_id)
        return self._matcher.is_stopped() and self.failure is None

    @property
    def failure(self) -> str | None:
        """Why it cannot go on; None if it can."""
        matcher = self._matcher
        if not matcher.is_error() and (matcher.is_accepting() or not matcher.is_stopped()):
            return None
        why = reason(matcher.get_error() or _NOTHING_FITS)
        why = "no token of this model fits" if why.startswith(_NOTHING_FITS) else why
        return f"structured_outputs cannot be followed any further: {why}"


class Structures:
    """Makes the states. For any number of threads; the first call of a structure takes milliseconds, or many more.

    vocab_size, eos_token_ids: the model's.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._vocabulary: LLTokenizer | None = None
        self._making_vocabulary = threading.Lock()
        self._kept: OrderedDict[StructuredOutputs, LLMatcher] = OrderedDict()
        self._keeping = threading.Lock()

    def warm(self) -> None:
        """Make what all structures need, which holds the interpreter's lock for a tenth of a second."""
        if is_available():
            self._vocabulary_of_tokenizer()

    def begin(self, asked: StructuredOutputs, output_ids: Iterable[int] = ()) -> Structure:
        """The state of an answer that has said these tokens.

        Raises InvalidJob for what cannot be followed, and JitneyError for tokens that do not fit.
        """
        matcher = self._compiled(asked).deep_copy()
        if not matcher.consume_tokens(list(output_ids)):
            raise JitneyError("what this answer has said does not fit its structured_outputs: another build began it")
        return Structure(matcher)

    def _compiled(self, asked: StructuredOutputs) -> LLMatcher:
        """Nobody changes it. Two threads that ask for the same new one both compile it, and one is kept."""
        with self._keeping:
            if asked in self._kept:
                self._kept.move_to_end(asked)
                return self._kept[asked]
        made = self._compile(asked)
        with self._keeping:
            self._kept[asked] = made
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return made

    def _compile(self, asked: StructuredOutputs) -> LLMatcher:
        if not is_available():
            raise InvalidJob(
                "this worker cannot follow structured_outputs: its llguidance is missing (pip install jitney[guided])",
                param="structured_outputs",
                code="unsupported_parameter",
            )
        from llguidance import LLMatcher

        check(asked)  # anyone may write to Redis: what would take all memory is refused before it is read in here
        vocabulary = self._vocabulary_of_tokenizer()

        def compiles() -> LLMatcher:
            grammar = LLMatcher.grammar_from_lark(lark_of(asked))
            return LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())

        matcher = on_deep_stack(compiles, asked)
        if matcher.is_error():
            raise refuse(asked, matcher.get_error())
        return matcher

    def _vocabulary_of_tokenizer(self) -> LLTokenizer:
        """Made when it is first needed: it takes a tenth of a second for 50,000 tokens."""
        with self._making_vocabulary:
            if self._vocabulary is None:
                from llguidance import LLTokenizer, TokenizerWrapper

                wanted = _Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids)
                self._vocabulary = LLTokenizer(TokenizerWrapper(wanted), eos_token=self._eos_token_ids or None)
            return self._vocabulary


class _Vocabulary:
    """The tokenizer as the library asks for it, by the names that it asks for. Special tokens are no text."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        pieces = tokenizer.pieces
        ids = range(vocab_size)
        self.tokens = [pieces.bytes_of(token_id) for token_id in ids]
        self.special_token_ids = [token_id for token_id in ids if pieces.is_special(token_id)]
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else None  # None: it adds one that no model has
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        shown = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return self._tokenizer.encode_part(shown, "structured_outputs")
