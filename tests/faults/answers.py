"""What is asked, and what a worker alone would answer: computed here without engine, queue or our own speller."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tests.engine.scripted_model import prefix_hash
from tests.faults.hash_model import MAX_MODEL_LEN, digest_of, draw, logprob_of

from jitney_worker.engine.sequence import SequenceParams
from jitney_worker.text.tokenizer import Tokenizer

WORDS = (
    *("the", "river", "rose", "in", "the", "night", "and", "by", "six", "the", "lower", "road", "was"),
    *("gone", "said", "Anna", "who", "had", "parcels"),
)
STOPS = ("er", "it", " a", "th", "zz")


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
    """What an undisturbed run says."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    num_prompt_tokens: int
    logprobs: tuple[float, ...] | None = None


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
        prompt_ids = self.prompt_ids(asked)
        stop, end_ids = asked.fields.get("stop"), self.end_ids(asked)
        said, reason = self._say(asked, prompt_ids, end_ids, stop)
        wants_logprobs = asked.fields.get("logprobs") is not None
        return Answer(
            tuple(said),
            self._text(said, end_ids, stop),
            reason,
            len(prompt_ids),
            tuple(map(logprob_of, said)) if wants_logprobs else None,
        )

    def prompt_ids(self, asked: Asked) -> list[int]:
        if "messages" in asked.fields:
            return self.tokenizer.encode_chat(asked.fields["messages"])
        prompt = asked.fields["prompt"]
        return self.tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else list(prompt)

    def end_ids(self, asked: Asked) -> frozenset[int]:
        own = frozenset() if asked.fields.get("ignore_eos") else self.tokenizer.eos_token_ids
        return frozenset(own) | frozenset(asked.fields.get("stop_token_ids", ()))

    def _say(
        self, asked: Asked, prompt_ids: Sequence[int], end_ids: frozenset[int], stop: str | None
    ) -> tuple[list[int], str]:
        params = SequenceParams(
            max_tokens=asked.max_tokens,
            temperature=asked.fields["temperature"],
            seed=asked.fields.get("seed", 0),
        )
        digest, said = digest_of(prompt_ids), []
        for position in range(min(params.max_tokens, MAX_MODEL_LEN - len(prompt_ids))):
            said.append(draw(digest ^ self.salt, params, position))
            digest = prefix_hash(digest, said[-1])
            if said[-1] in end_ids or (stop is not None and stop in self._text(said, end_ids, None)):
                return said, "stop"
        return said, "length"

    def _text(self, said: Sequence[int], end_ids: frozenset[int], stop: str | None) -> str:
        shown = [token_id for token_id in said if token_id not in end_ids]
        text: str = self.plain.decode(shown, skip_special_tokens=True)
        return text if stop is None else text.partition(stop)[0]


@dataclass(slots=True)
class Asking:
    """Makes requests out of a seed: greedy and seeded, ids and text and chat, stop strings, stop ids, logprobs.

    prefix: what their names begin with. fixed: fields that all of them have.
    """

    seed: int
    max_tokens: tuple[int, int] = (20, 90)
    prefix: str = "s"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    _random: random.Random = field(init=False)
    _number: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

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
        return Asked(f"{self.prefix}{self.seed}-{self._number}", fields | dict(self.fixed) | fixed)

    def _prompt(self) -> dict[str, Any]:
        draw_one, kind = self._random, self._random.random()
        if kind < 0.5:  # beginnings that are shared: the prefix cache is at work too
            start = [7, 8, 9] * draw_one.randint(0, 16)
            return {"prompt": [*start, *(draw_one.randrange(3, 500) for _ in range(draw_one.randint(1, 60)))]}
        words = " ".join(draw_one.choices(WORDS, k=draw_one.randint(2, 20)))
        if kind < 0.75:
            return {"prompt": words}
        return {"messages": [{"role": "user", "content": words}]}
