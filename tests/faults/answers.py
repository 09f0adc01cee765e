"""What is asked, and what a worker alone would answer: computed here without engine, queue or our own speller."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tokenizers
from tests.engine.scripted_model import prefix_hash
from tests.faults.hash_model import MAX_MODEL_LEN, Dice, digest_of, draw, logprob_of

from jitney_worker.text.tokenizer import Tokenizer

WORDS = (
    *("the", "river", "rose", "in", "the", "night", "and", "by", "six", "the", "lower", "road", "was"),
    *("gone", "said", "Anna", "who", "had", "parcels"),
)
STOPS = ("er", "it", " a", "th", "zz")
PENALTIES = ({"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.2})
MOST_PENALISED = 200
"""Tokens of an answer with penalties at most: the model has 509, and passes over each that they count."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, as keywords of `AsyncClient.enqueue` and fields of `POST /v1/jobs` alike."""

    name: str
    fields: dict[str, Any]

    @property
    def max_tokens(self) -> int:
        return int(self.fields["max_tokens"])


@dataclass(frozen=True, slots=True)
class Answer:
    """What an undisturbed run says; others: its choices after the first, each as an answer."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    num_prompt_tokens: int
    logprobs: tuple[float, ...] | None = None
    others: tuple[Answer, ...] = ()

    @property
    def choices(self) -> tuple[Answer, ...]:
        return (self, *self.others)

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices)


@dataclass(frozen=True, slots=True)
class Alone:
    """The reference. `tokenizer` reads prompts; the text of an answer comes from the tokenizers library itself."""

    tokenizer: Tokenizer
    plain: tokenizers.Tokenizer
    salt: int = 0

    @classmethod
    def of(cls, directory: Path, salt: int = 0) -> Alone:
        return cls(Tokenizer.load(directory), tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")), salt)

    def answer(self, asked: Asked) -> Answer:
        first, *others = (self._choice(asked, number) for number in range(asked.fields.get("n", 1)))
        return replace(first, others=tuple(others))

    def prompt_ids(self, asked: Asked) -> list[int]:
        if "messages" in asked.fields:
            return self.tokenizer.encode_chat(asked.fields["messages"])
        prompt = asked.fields["prompt"]
        return self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)

    def end_ids(self, asked: Asked) -> frozenset[int]:
        own = frozenset() if asked.fields.get("ignore_eos") else self.tokenizer.eos_token_ids
        return frozenset(own) | frozenset(asked.fields.get("stop_token_ids", ()))

    def _choice(self, asked: Asked, number: int) -> Answer:
        prompt_ids = self.prompt_ids(asked)
        said, reason = self._say(asked, prompt_ids, number)
        wants_logprobs = asked.fields.get("logprobs") is not None
        return Answer(
            tuple(said),
            self._shown(asked, said),
            reason,
            len(prompt_ids),
            tuple(map(logprob_of, said)) if wants_logprobs else None,
        )

    def _say(self, asked: Asked, prompt_ids: Sequence[int], number: int) -> tuple[list[int], str]:
        fields, end_ids = asked.fields, self.end_ids(asked)
        dice = Dice(fields["temperature"], fields.get("seed", 0), number)
        forbidden = {*fields.get("logit_bias", ()), *self._bad_ids(fields.get("bad_words", ()))}
        digest, said = digest_of(prompt_ids), list[int]()
        for position in range(min(asked.max_tokens, MAX_MODEL_LEN - len(prompt_ids))):
            over = forbidden | _penalised(fields, prompt_ids, said)
            if position < fields.get("min_tokens", 0):
                over |= end_ids
            said.append(draw(digest ^ self.salt, dice, position, over))
            digest = prefix_hash(digest, said[-1])
            if said[-1] in end_ids or self._stop_at(asked, said) >= 0:
                return said, "stop"
        return said, "length"

    def _bad_ids(self, words: Sequence[str]) -> set[int]:
        """All words here are single letters, and so are single tokens."""
        spelled = [
            self.plain.encode(start + word, add_special_tokens=False).ids for word in words for start in ("", " ")
        ]
        return {ids[0] for ids in spelled if len(ids) == 1}

    def _stop_at(self, asked: Asked, said: Sequence[int]) -> int:
        """Where in the text the stop string begins that ends the answer; -1 = nowhere.

        The first `min_tokens` tokens may hold it, and it may begin in them: it must not end there.
        """
        stop, num_exempt = asked.fields.get("stop"), asked.fields.get("min_tokens", 0)
        if stop is None or len(said) <= num_exempt:
            return -1
        # What is no character yet when they end is the next token's text.
        exempt = self._text(asked, said[:num_exempt]).rstrip("\ufffd")
        return self._text(asked, said).find(stop, max(0, len(exempt) - len(stop) + 1))

    def _shown(self, asked: Asked, said: Sequence[int]) -> str:
        text, found = self._text(asked, said), self._stop_at(asked, said)
        if found < 0:
            return text
        return text[: found + (len(asked.fields["stop"]) if asked.fields.get("include_stop_str_in_output") else 0)]

    def _text(self, asked: Asked, said: Sequence[int]) -> str:
        hidden = () if asked.fields.get("include_stop_str_in_output") else self.end_ids(asked)
        text: str = self.plain.decode([token_id for token_id in said if token_id not in hidden])
        return text


def _penalised(fields: Mapping[str, Any], prompt_ids: Sequence[int], said: Sequence[int]) -> set[int]:
    """What was said, once or twice or in the prompt, as the penalties count it."""
    once = said if "presence_penalty" in fields else ()
    twice = (token_id for token_id in said if said.count(token_id) > 1) if "frequency_penalty" in fields else ()
    ever = (*prompt_ids, *said) if "repetition_penalty" in fields else ()
    return {*once, *twice, *ever}


@dataclass(slots=True)
class Asking:
    """Makes requests out of a seed: greedy and seeded, ids and text and chat, options of every kind, some of several.

    prefix: what their names begin with. fixed: fields that all of them have.
    """

    seed: int
    max_tokens: tuple[int, int] = (20, 90)
    prefix: str = "s"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    _random: random.Random = field(init=False)
    _of_options: random.Random = field(init=False)  # its own, so that prompts do not depend on what options there are
    _number: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._of_options = random.Random(f"options {self.seed}")

    def some(self, count: int, **fixed: Any) -> list[Asked]:
        return [self.one(**fixed) for _ in range(count)]

    def one(self, **fixed: Any) -> Asked:
        draw_one = self._random
        self._number += 1
        fields: dict[str, Any] = self._prompt() | {"max_tokens": draw_one.randint(*self.max_tokens)}
        if draw_one.random() < 0.5:
            fields |= {"temperature": 0.0}
        else:
            fields |= {"temperature": 0.8, "seed": draw_one.randrange(2**31)}
        if draw_one.random() < 0.25:
            fields["stop"] = draw_one.choice(STOPS)
        if draw_one.random() < 0.15:
            fields["stop_token_ids"] = draw_one.sample(range(3, 400), 6)
        if draw_one.random() < 0.2:
            fields["logprobs"] = 0
        fields |= dict(self.fixed) | fixed
        return Asked(f"{self.prefix}{self.seed}-{self._number}", self._options(fields["max_tokens"]) | fields)

    def _options(self, max_tokens: int) -> dict[str, Any]:
        """What makes the next token depend on those before it, in an answer that another worker goes on with."""
        draw_one, options = self._of_options, dict[str, Any]()
        if draw_one.random() < 0.15:
            options["n"] = draw_one.randint(2, 3)
        if draw_one.random() < 0.2:
            options["min_tokens"] = draw_one.randint(1, max_tokens)
        if draw_one.random() < 0.2:
            options["include_stop_str_in_output"] = True
        if draw_one.random() < 0.25 and max_tokens <= MOST_PENALISED:
            options |= draw_one.choice(PENALTIES)
        if draw_one.random() < 0.15:
            options["logit_bias"] = dict.fromkeys(draw_one.sample(range(3, 509), 60), -100.0)
        if draw_one.random() < 0.15:
            options["bad_words"] = draw_one.sample(string.ascii_lowercase, 10)
        return options

    def _prompt(self) -> dict[str, Any]:
        draw_one, kind = self._random, self._random.random()
        if kind < 0.5:  # beginnings that are shared: the prefix cache is at work too
            start = [7, 8, 9] * draw_one.randint(0, 16)
            return {"prompt": [*start, *(draw_one.randrange(3, 500) for _ in range(draw_one.randint(1, 60)))]}
        words = " ".join(draw_one.choices(WORDS, k=draw_one.randint(2, 20)))
        if kind < 0.75:
            return {"prompt": words}
        return {"messages": [{"role": "user", "content": words}]}
