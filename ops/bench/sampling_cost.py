"""What each sampling option costs per step: the sampler alone, on random logits of a real vocabulary's size.

    python ops/bench/sampling_cost.py [--rows 64] [--vocab 49152] [--rounds 15] [--threads 1] [--device cpu]

Prints microseconds per step for greedy and for sampled rows: without an option, then with it on every row, then on
one row among others without. All variants take turns within each round, so that whatever else the machine does
meets them alike. The figures are medians over rounds; "more" is the median of what a variant took more than the
rows without an option in the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from jitney_worker.engine.protocol import ScheduledSequence
from jitney_worker.engine.sequence import LogitRules, Sequence, SequenceId, SequenceParams, SequenceRequest
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
    "presence_penalty 0.5": _rules(presence_penalty=0.5),
    "frequency_penalty 0.5": _rules(frequency_penalty=0.5),
    "repetition_penalty 1.1": _rules(repetition_penalty=1.1),
    "logit_bias of 300": _rules(logit_bias=tuple((7 * token_id, 1.0) for token_id in range(300))),
    "allowed_token_ids, 1000": _rules(allowed_token_ids=tuple(range(0, 5_000, 5))),
    "bad_words, 20 of 2": _rules(bad_words=tuple((token_id, token_id + 1) for token_id in range(20))),
    "min_tokens 500": _params(min_tokens=500),
    "logprobs 5": _params(num_logprobs=5),
}
ONLY_WHEN_SAMPLED = ("min_p 0.05", "top_k 50", "top_p 0.95")


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
        scheduled.append(ScheduledSequence(Sequence.of(request), stop - 1, stop, True))
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


def measure(num_rows: int, vocab_size: int, num_rounds: int, device: str) -> list[dict[str, object]]:
    """One entry per kind of rows and option; prints them as they come."""
    report: list[dict[str, object]] = []
    for kind, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        base = SequenceParams(10_000, temperature=temperature, seed=1, stop_token_ids=END_IDS)
        competitors = variants(num_rows, vocab_size, base)
        for number in range(num_rounds + 1):
            logits = peaked_logits(num_rows, vocab_size, seed=number).to(device)
            for one in competitors.values():
                one.step(logits)
        plain = competitors["", 0].costs[1:]
        print(f"\n{kind:<24} {'all rows':>9} {'more':>8} {'one row':>9} {'more':>8}   µs per step, {num_rows} rows")
        print(f"{'no option':<24} {statistics.median(plain):>9.0f}")
        for name in dict.fromkeys(name for name, _ in competitors if name):
            figures: list[float] = []
            for num_changed in (num_rows, 1):
                costs = competitors[name, num_changed].costs[1:]
                more = [cost - without for cost, without in zip(costs, plain, strict=True)]
                figures += [statistics.median(costs), statistics.median(more)]
            print(f"{name:<24} {figures[0]:>9.0f} {figures[1]:>8.0f} {figures[2]:>9.0f} {figures[3]:>8.0f}")
            names = ("all_us", "all_more_us", "one_us", "one_more_us")
            report.append({"rows": kind, "option": name, **dict(zip(names, figures, strict=True))})
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        report = measure(options.rows, options.vocab, options.rounds, options.device)
    if options.json:
        options.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
