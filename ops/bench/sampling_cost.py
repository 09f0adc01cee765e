"""What each sampling option costs per step: the sampler alone, on random logits of a real vocabulary's size.

    python -m ops.bench.sampling_cost [--rows 64] [--vocab 49152] [--rounds 15] [--threads 1] [--device cpu]
        [--write FILE] [--json FILE]

Microseconds per step for greedy and for sampled rows: without an option, then with it on every row, then on one row
among others without. All variants take turns within each round, so that whatever else the machine does meets them
alike. Times are medians over rounds; a ratio is the median of what a variant took in relation to the rows without an
option in the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from ops.bench import page

from jitney_worker.engine.protocol import ScheduledSequence
from jitney_worker.engine.sequence import LogitRules, SequenceId, SequenceParams, SequenceRequest
from jitney_worker.engine.sequence import Sequence as Running
from jitney_worker.model.rows import SamplingRows
from jitney_worker.model.sampler import sample

PROMPT_TOKENS, OUTPUT_TOKENS = 256, 128
END_IDS = frozenset({0, 2})

Change = Callable[[SequenceParams], SequenceParams]


def _rules(**rules: object) -> Change:
    return lambda params: replace(params, rules=LogitRules(**rules))  # type: ignore[arg-type]


def _params(**options: object) -> Change:
    return lambda params: replace(params, **options)  # type: ignore[arg-type]


OPTIONS: dict[str, Change] = {
    "min_p 0.05": _params(min_p=0.05),
    "top_k 50": _params(top_k=50),
    "top_p 0.95": _params(top_p=0.95),
    "top_k 50, top_p 0.95": _params(top_k=50, top_p=0.95),
    "presence_penalty 0.5": _rules(presence_penalty=0.5),
    "frequency_penalty 0.5": _rules(frequency_penalty=0.5),
    "repetition_penalty 1.1": _rules(repetition_penalty=1.1),
    "logit_bias of 300": _rules(logit_bias=tuple((7 * token_id, 1.0) for token_id in range(300))),
    "allowed_token_ids, 1000": _rules(allowed_token_ids=tuple(range(0, 5_000, 5))),
    "bad_words, 20 of 2": _rules(bad_words=tuple((token_id, token_id + 1) for token_id in range(20))),
    "min_tokens 500": _params(min_tokens=500),
    "logprobs 5": _params(num_logprobs=5),
}
ONLY_WHEN_SAMPLED = ("min_p 0.05", "top_k 50", "top_p 0.95", "top_k 50, top_p 0.95")
PLACE = "sampling-cost"


@dataclass(frozen=True, slots=True)
class Cost:
    """One option on rows of one kind. us: microseconds per step; ratio: to no option, in the same round."""

    rows: str
    option: str
    all_us: float
    all_ratio: float
    one_us: float
    one_ratio: float


@dataclass
class Variant:
    """One set of rows. Each keeps its own state between steps, as a runner does."""

    scheduled: list[ScheduledSequence]
    rows: SamplingRows
    costs: list[float]

    def step(self, logits: torch.Tensor) -> None:
        """Sample, time it, and let every sequence grow by a token."""
        _wait_for(logits)
        start = time.perf_counter_ns()
        outcomes = sample(logits, self.rows.of(self.scheduled))
        _wait_for(logits)
        self.costs.append((time.perf_counter_ns() - start) / 1_000)
        assert len(outcomes) == len(self.scheduled)
        for one in self.scheduled:
            one.sequence.token_ids.append(len(self.costs) * 31 % 5_000)
            one.start, one.stop = one.stop, one.stop + 1


def _wait_for(logits: torch.Tensor) -> None:
    if logits.device.type == "cuda":
        torch.cuda.synchronize()


def variant(num_rows: int, vocab_size: int, base: SequenceParams, change: Change | None, num_changed: int) -> Variant:
    """Rows of which the first `num_changed` have the option."""
    scheduled = []
    for number in range(num_rows):
        params = change(base) if change is not None and number < num_changed else base
        draw = torch.Generator().manual_seed(number)
        prompt = tuple(torch.randint(5_000, (PROMPT_TOKENS,), generator=draw).tolist())
        output = tuple(torch.randint(5_000, (OUTPUT_TOKENS,), generator=draw).tolist())
        request = SequenceRequest(SequenceId(f"s{number}/0"), prompt, params, (0, 0.0, 0, number), output)
        stop = PROMPT_TOKENS + OUTPUT_TOKENS
        scheduled.append(ScheduledSequence(Running.of(request), stop - 1, stop, True))
    return Variant(scheduled, SamplingRows(vocab_size), [])


def variants(num_rows: int, vocab_size: int, base: SequenceParams) -> dict[tuple[str, int], Variant]:
    """(option, rows that have it) -> rows. The empty option is nobody's."""
    found = {("", 0): variant(num_rows, vocab_size, base, None, 0)}
    for name, change in OPTIONS.items():
        if base.temperature > 0 or name not in ONLY_WHEN_SAMPLED:
            for num_changed in (num_rows, 1):
                found[name, num_changed] = variant(num_rows, vocab_size, base, change, num_changed)
    return found


def peaked_logits(num_rows: int, vocab_size: int, *, seed: int) -> torch.Tensor:
    """A few favourites far above the rest, as a model has them: about a tenth of all tokens can still be drawn."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=draw) * 2
    favourites = torch.randint(vocab_size, (num_rows, 8), generator=draw)
    return logits.scatter_add_(1, favourites, 20.0 + torch.randn(num_rows, 8, generator=draw))


def measure(num_rows: int, vocab_size: int, num_rounds: int, device: str) -> list[Cost]:
    """One entry per kind of rows and option; the first of each kind is of no option."""
    report: list[Cost] = []
    for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        base = SequenceParams(10_000, temperature=temperature, seed=1, stop_token_ids=END_IDS)
        competitors = variants(num_rows, vocab_size, base)
        turns = list(competitors.values())
        for number in range(num_rounds + 1):
            logits = peaked_logits(num_rows, vocab_size, seed=number).to(device)
            for one in turns:
                one.step(logits)
            turns.append(turns.pop(0))  # the first one of a round finds cold caches
        costs = {which: one.costs[1:] for which, one in competitors.items()}
        plain = costs["", 0]
        report.append(Cost(kind, "none", statistics.median(plain), 1.0, statistics.median(plain), 1.0))
        for name in dict.fromkeys(name for name, _ in costs if name):
            report.append(Cost(kind, name, *_figures(costs[name, num_rows], plain), *_figures(costs[name, 1], plain)))
    return report


def _figures(costs: Sequence[float], plain: Sequence[float]) -> tuple[float, float]:
    ratios = [cost / without for cost, without in zip(costs, plain, strict=True)]
    return statistics.median(costs), statistics.median(ratios)


def text(report: Sequence[Cost], asked: argparse.Namespace, machine: str) -> str:
    """The report as Markdown: what was measured, and a table."""
    said = page.paragraph(
        f"Microseconds per step of {asked.rows} rows of {asked.vocab:,} logits on {asked.device},",
        f"{'one thread' if asked.threads == 1 else f'{asked.threads} threads'}, torch {torch.__version__};",
        f"medians of {asked.rounds} rounds in which all of these took turns, and beside each its ratio to the same",
        f"rows without an option in the same round. {machine}.",
    )
    head = ["rows", "option", "on all rows", "ratio", "on one row", "ratio"]
    return f"{said}\n\n{page.table(head, [_cells(cost) for cost in report])}"


def _cells(cost: Cost) -> list[str]:
    """A row of the table; nobody has no option on one row."""
    on_all = [f"{cost.all_us:,.0f}", page.times(cost.all_ratio, 1.0)]
    on_one = [f"{cost.one_us:,.0f}", page.times(cost.one_ratio, 1.0)]
    return [cost.rows, cost.option, *on_all, *(["", ""] if cost.option == "none" else on_one)]


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", type=Path, help="a document with a place for this table")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(words)


def main() -> None:
    asked = arguments()
    page.check_place(asked.write, PLACE)
    machine = page.machine()
    torch.set_num_threads(asked.threads)
    with torch.inference_mode():
        report = measure(asked.rows, asked.vocab, asked.rounds, asked.device)
    block = text(report, asked, machine)
    print(block)
    page.write(asked.write, PLACE, block)
    if asked.json:
        asked.json.write_text(json.dumps([asdict(cost) for cost in report], indent=2) + "\n")


if __name__ == "__main__":
    main()
