"""What a step costs outside the model: schedule and commit of the real engine over a runner that does nothing.

    python ops/bench/step_cost.py [--running 64] [--steps 400] [--rounds 7] [--json FILE]

Prints microseconds per step, the median over rounds of each round's median step, for 0, 100 and 10,000 waiting
sequences: plain decode, and decode with a sequence leaving and another joining in every step.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from pathlib import Path

from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import ModelOutput, Sampled, SchedulerOutput
from jitney_worker.engine.sequence import SequenceId, SequenceParams, SequenceRequest
from jitney_worker.engine.settings import EngineSettings

PROMPT_TOKENS = 32


class IdleRunner:
    """Always the same token, at no cost worth measuring."""

    token = Sampled(7)

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        return ModelOutput([self.token for item in scheduled.scheduled if item.samples])


def engine_with(num_running: int, num_waiting: int, *, max_tokens: int, stagger: bool) -> LocalEngine:
    """An engine whose seats are all taken and past their prompts.

    stagger: the first ones end one after the other, and so does everyone who takes their seats.
    """
    length = PROMPT_TOKENS + max_tokens
    settings = EngineSettings(
        max_model_len=length + 1,
        num_blocks=num_running * (length // 16 + 2),
        max_num_seqs=num_running,
        max_num_batched_tokens=max(2048, num_running * PROMPT_TOKENS),
    )
    engine = LocalEngine(settings, IdleRunner())
    for arrival in range(num_running + num_waiting):
        num_tokens = max_tokens
        if stagger:
            num_tokens = 2 + arrival if arrival < num_running else num_running
        prompt = tuple(range(arrival, arrival + PROMPT_TOKENS))
        engine.add(
            SequenceRequest(SequenceId(f"j{arrival}/0"), prompt, SequenceParams(num_tokens), (0, 0.0, 0, arrival))
        )
    engine.step()
    return engine


def microseconds_per_step(num_running: int, num_waiting: int, num_steps: int, *, churn: bool) -> tuple[float, float]:
    """Median and 99th percentile over the steps of one round."""
    engine = engine_with(num_running, num_waiting, max_tokens=num_steps + 2, stagger=churn)
    gc.collect()
    costs = []
    for _ in range(min(num_steps, num_waiting) if churn else num_steps):
        start = time.perf_counter_ns()
        deltas = engine.step()
        costs.append((time.perf_counter_ns() - start) / 1000)
        assert len(deltas) == num_running
    return statistics.median(costs), statistics.quantiles(costs, n=100)[98]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, default=64)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print(f"{'waiting':>8} {'work':<28} {'median µs':>10} {'p99 µs':>8}   at {options.running} running sequences")
    for churn, work in ((False, "decode"), (True, "decode, one leaves and joins")):
        for num_waiting in (0, 100, 10_000):
            if churn and not num_waiting:
                continue
            rounds = [
                microseconds_per_step(options.running, num_waiting, options.steps, churn=churn)
                for _ in range(options.rounds)
            ]
            median, p99 = (statistics.median(column) for column in zip(*rounds, strict=True))
            rows.append({"num_running": options.running, "num_waiting": num_waiting, "work": work})
            rows[-1] |= {"median_us": round(median, 1), "p99_us": round(p99, 1)}
            print(f"{num_waiting:>8,} {work:<28} {median:>10.0f} {p99:>8.0f}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
