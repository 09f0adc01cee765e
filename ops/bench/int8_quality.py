"""What int8 weights cost in quality: the same model in bfloat16 and in int8, over the same text and the same prompts.

    python -m ops.bench.int8_quality [--model NAME] [--text FILE] [--max-tokens 64] [--json FILE]

Perplexity over a text (ops/bench/int8_text.txt, written for this), in windows that each begin anew. How often both
think the same token the most probable, given the same text. And greedy answers to some questions: how many tokens agree
before the first that does not.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

from ops.bench import flags, page

from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import TokenLogprobs
from jitney_worker.engine.sequence import SequenceId, SequenceParams, SequenceRequest
from jitney_worker.engine.settings import EngineSettings
from jitney_worker.model.resolve import resolve
from jitney_worker.model.runner import TorchRunner, load_runner
from jitney_worker.text.tokenizer import Tokenizer

TEXT = page.ROOT / "ops" / "bench" / "int8_text.txt"
PLACE = "int8-quality"
WINDOW = 512
QUESTIONS = (
    "What is the capital of France?",
    "Explain in three sentences why the sky is blue.",
    "Write a short poem about a harbour in the rain.",
    "How do I bake a simple loaf of bread?",
    "List five animals that live in the desert.",
    "What is the difference between weather and climate?",
    "Write a Python function that adds two numbers.",
    "Tell me a story about a lost umbrella.",
    "Why should programs have time limits?",
    "Translate to French: The boat leaves at six.",
    "Name three inventions of the nineteenth century.",
    "Give me advice for a job interview.",
    "What is 17 plus 25?",
    "Describe how a river changes its course.",
    "Who was Isaac Newton?",
    "Write an email that asks for a day off.",
)


@dataclass(frozen=True)
class Heard:
    """What one model says. nll: of each token of the text but the windows' first ones, in nats."""

    nll: list[float]
    best: list[int]
    answers: list[list[int]]

    @property
    def perplexity(self) -> float:
        return math.exp(statistics.fmean(self.nll))


def hear(runner: TorchRunner, windows: Sequence[Sequence[int]], prompts: Sequence[Sequence[int]], most: int) -> Heard:
    """Everything in one engine."""
    settings = EngineSettings(
        max_model_len=runner.max_model_len, num_blocks=runner.num_blocks, block_size=runner.block_size
    )
    engine = LocalEngine(settings, runner)
    reading, answering = SequenceParams(1, num_prompt_logprobs=1), SequenceParams(most)
    jobs = [(ids, reading) for ids in windows] + [(ids, answering) for ids in prompts]
    said: dict[str, tuple[list[TokenLogprobs], list[int]]] = {}
    for i, (ids, params) in enumerate(jobs):
        engine.add(SequenceRequest(SequenceId(f"{i}/0"), tuple(ids), params, (0, 0.0, 0, i)))
        said[f"{i}/0"] = ([], [])
    while engine.has_work():
        for delta in engine.step():
            said[delta.id][0].extend(delta.prompt_logprobs)
            said[delta.id][1].extend(delta.token_ids)
    text = [one for logprobs, _ in said.values() for one in logprobs]
    answers = [ids for _, ids in list(said.values())[len(windows) :]]
    return Heard([-one.logprob for one in text], [one.top[0][0] for one in text], answers)


def shares(pairs: Iterable[tuple[int, int]]) -> float:
    """How many of them are equal."""
    return statistics.fmean(one == other for one, other in pairs)


def agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def figures(whole: Heard, quantised: Heard) -> dict[str, float]:
    """What the table says, and the JSON."""
    common = [agreeing(one, other) for one, other in zip(whole.answers, quantised.answers, strict=True)]
    lengths = [len(one) for one in whole.answers]
    return {
        "tokens_of_text": len(whole.nll),
        "perplexity_bf16": whole.perplexity,
        "perplexity_int8": quantised.perplexity,
        "same_best_token": shares(zip(whole.best, quantised.best, strict=True)),
        "answers": len(lengths),
        "answers_equal": sum(one == other for one, other in zip(whole.answers, quantised.answers, strict=True)),
        "tokens_before_the_first_difference": statistics.fmean(common),
        "tokens_of_an_answer": statistics.fmean(lengths),
    }


def block_of(found: dict[str, float]) -> str:
    whole, quantised = found["perplexity_bf16"], found["perplexity_int8"]
    rows = [
        (f"perplexity over {found['tokens_of_text']:,.0f} tokens", f"{whole:.3f}", f"{quantised:.3f}"),
        ("the same most probable token", "", f"{found['same_best_token']:.1%}"),
        ("greedy answers equal to the last token", "", f"{found['answers_equal']:.0f} of {found['answers']:.0f}"),
        (
            f"tokens before the first difference, of {found['tokens_of_an_answer']:.0f}",
            "",
            f"{found['tokens_before_the_first_difference']:.1f}",
        ),
    ]
    return page.table(("", "bf16", "int8"), rows)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(__doc__)
    parser.add_argument("--model", default=flags.MODEL, help="registered name or directory; %(default)s")
    parser.add_argument("--text", type=flags.existing_file, default=TEXT, metavar="FILE")
    parser.add_argument("--max-tokens", type=flags.positive, default=64, help="of an answer; %(default)s")
    parser.add_argument("--num-threads", type=flags.positive, help="of the model; default: torch's own")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> None:
    asked = arguments(words)
    page.check_place(asked.write, PLACE)
    with flags.told():
        directory = resolve(asked.model)
        tokenizer = Tokenizer.load(directory)
        ids = tokenizer.encode_prompt(Path(asked.text).read_text(encoding="utf-8"))
        windows = [ids[first : first + WINDOW] for first in range(0, len(ids), WINDOW)]
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        prompts = [tokenizer.encode_chat(chat) for chat in chats]
        heard = []
        for quantization in ("none", "int8"):
            runner = load_runner(
                directory, dtype="bfloat16", kernels="native", quantization=quantization, num_threads=asked.num_threads
            )
            heard.append(hear(runner, [one for one in windows if len(one) > 1], prompts, asked.max_tokens))
    found = figures(heard[0], heard[1])
    flags.leave_behind(asked, PLACE, block_of(found), {**found, "heard": [asdict(one) for one in heard]})


if __name__ == "__main__":
    main()
