"""What one step takes, by how many sequences are in it, and what it cannot take less than.

    python -m ops.bench.step_curve [--write FILE] [--json FILE] [--svg FILE]

Two to four minutes. "A step costs the same for one seat or many" is true where reading the weights is all that matters.
Here two bounds are drawn: reading every weight once, at the bandwidth measured just before, and the step's matrix
products at the speed that oneDNN reaches with so many rows. Sequences go from 64 to 192 tokens of context.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from ops.bench import chart, flags, limits, page
from ops.bench.lab import Lab, open_lab

from jitney_worker.engine.sequence import SequenceId, SequenceParams, SequenceRequest

PLACE = "step-curve"
SEATS = (1, 2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Point:
    """Steps of so many seats. Milliseconds; step_ms: median over rounds of each round's median step.

    read_ms: to read all weights once. products_ms: for the step's matrix products; None where no peak is known.
    """

    seats: int
    step_ms: float
    least_ms: float
    most_ms: float
    read_ms: float
    products_ms: float | None

    @property
    def tokens_per_s(self) -> float:
        return self.seats / self.step_ms * 1_000


def num_weights(directory: Path) -> int:
    """Numbers that one decode step reads, from the files' headers: all, but for a table that only embeds."""
    sizes: dict[str, int] = {}
    for file in sorted(directory.glob("*.safetensors")):
        for name, entry in _header(file).items():
            if name != "__metadata__":
                size = 1
                for length in entry["shape"]:
                    size *= length
                sizes[name] = size
    if "lm_head.weight" in sizes:
        sizes.pop("model.embed_tokens.weight", None)
    return sum(sizes.values())


def _header(file: Path) -> Mapping[str, dict[str, list[int]]]:
    with file.open("rb") as opened:
        (length,) = struct.unpack("<Q", opened.read(8))
        header: Mapping[str, dict[str, list[int]]] = json.loads(opened.read(length))
        return header


def fitted(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(a, b) of the line `step = a + b * seats` through the points, by least squares."""
    if len(points) < 2:
        return (points[0][1], 0.0)
    slope, intercept = statistics.linear_regression(*zip(*points, strict=True))
    return intercept, slope


def decode_steps(lab: Lab, seats: int, prompt_tokens: int, output_tokens: int, seed: int = 1) -> list[float]:
    """Seconds of each step in which all seats decode: `output_tokens - 1` of them."""
    chance = random.Random(seed)
    engine = lab.engine(seats, admission_reserve=0.0, max_num_batched_tokens=max(2_048, seats * prompt_tokens))
    for number in range(seats):
        prompt = tuple(chance.randrange(3, lab.runner.vocab_size) for _ in range(prompt_tokens))
        params = SequenceParams(output_tokens)
        engine.add(SequenceRequest(SequenceId(f"curve{seed}.{number}/0"), prompt, params, (0, 0.0, 0, number)))
    assert len(engine.step()) == seats, "one step takes all prompts"
    took = []
    while engine.has_work():
        start = time.perf_counter()
        deltas = engine.step()
        took.append(time.perf_counter() - start)
        assert len(deltas) == seats
    return took


def measure(lab: Lab, asked: argparse.Namespace) -> list[Point]:
    """So many rounds, in turns up and down the list."""
    weights = num_weights(lab.directory)
    kind = lab.runner.dtype if lab.quantization == "none" else lab.quantization
    num_bytes = weights * getattr(torch, kind).itemsize
    num_threads, of_torch = lab.num_threads, torch.get_num_threads()
    read_ms = num_bytes / limits.read_gb_per_s(num_bytes, num_threads) / 1e6
    torch.set_num_threads(of_torch)  # as the runner left it
    flags.say(f"{num_bytes / 1e6:.0f} MB of weights: read in {read_ms:.2f} ms")
    medians: dict[int, list[float]] = {seats: [] for seats in asked.seats}
    for number in range(asked.rounds + 1):
        for seats in sorted(asked.seats, reverse=number % 2 == 1):
            steps = decode_steps(lab, seats, asked.prompt_tokens, asked.output_tokens if number else 3, number + 1)
            if number:
                medians[seats].append(statistics.median(steps) * 1_000)
                flags.say(f"round {number}: {seats} seats, {medians[seats][-1]:.2f} ms")
    peaks = {
        seats: limits.peak_gflops(kind, seats, 30, num_threads) if kind in limits.kinds() else None
        for seats in asked.seats
    }
    return [_point(seats, medians[seats], read_ms, weights, peaks[seats]) for seats in asked.seats]


def _point(seats: int, step_ms: Sequence[float], read_ms: float, weights: int, gflops: float | None) -> Point:
    """One multiplication and one addition for each weight and seat."""
    return Point(
        seats,
        step_ms=round(statistics.median(step_ms), 3),
        least_ms=round(min(step_ms), 3),
        most_ms=round(max(step_ms), 3),
        read_ms=round(read_ms, 3),
        products_ms=None if gflops is None else round(2 * weights * seats / gflops / 1e6, 3),
    )


def text(points: Sequence[Point], lab: Lab, asked: argparse.Namespace, machine: str) -> str:
    fixed, each = fitted([(point.seats, point.step_ms) for point in points])
    rows = [
        [
            str(point.seats),
            f"{point.step_ms:.1f}",
            f"{point.least_ms:.1f}–{point.most_ms:.1f}",
            f"{point.tokens_per_s:,.0f}",
            f"{point.read_ms:.1f}",
            "–" if point.products_ms is None else f"{point.products_ms:.1f}",
            page.times(point.step_ms, max(point.read_ms, point.products_ms or 0.0)),
        ]
        for point in points
    ]
    return "\n\n".join(
        (
            page.paragraph(
                f"`python -m ops.bench.step_curve`, {lab.setting}, {lab.num_threads} threads; context",
                f"{asked.prompt_tokens} to {asked.prompt_tokens + asked.output_tokens}, median of {asked.rounds}",
                "rounds, each the median of its steps.",
                f"{machine}. A step takes {fixed:.1f} ms and {each:.2f} ms for each seat (least squares).",
            ),
            page.table(
                ["seats", "step, ms", "spread", "tokens/s", "weights read, ms", "matrix products, ms", "of the larger"],
                rows,
            ),
        )
    )


def picture(points: Sequence[Point], lab: Lab) -> chart.Chart:
    ticks = tuple((float(point.seats), str(point.seats)) for point in points)
    series = [chart.Series("step", tuple((float(p.seats), p.step_ms) for p in points))]
    series.append(
        chart.Series("all weights read once", tuple((float(p.seats), p.read_ms) for p in points), is_limit=True)
    )
    products = tuple((float(p.seats), p.products_ms) for p in points if p.products_ms is not None)
    if products:
        series.append(chart.Series("matrix products alone", products, is_limit=True))
    rate = chart.Series("tokens per second", tuple((float(p.seats), p.tokens_per_s) for p in points))
    return chart.Chart(
        "What a step takes, by the seats in it",
        f"{lab.setting}, {lab.num_threads} threads",
        (
            chart.Panel("a step", "seats", "ms", tuple(series), ticks[-4:]),
            chart.Panel("throughput", "seats", "tokens/s", (rate,), ticks[-4:]),
        ),
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(__doc__)
    flags.add_picture(parser)
    flags.add_engine(parser)
    parser.add_argument("--seats", type=flags.listed(flags.positive), default=SEATS, metavar="1,2,4")
    parser.add_argument("--prompt-tokens", type=flags.positive, default=64)
    parser.add_argument("--output-tokens", type=flags.at_least(2), default=128)
    parser.add_argument("--rounds", type=flags.positive, default=3)
    return parser.parse_args(words)


@flags.told()
def main(words: Sequence[str] | None = None) -> None:
    asked = arguments(words)
    page.check_place(asked.write, PLACE)
    machine = page.machine()
    per_seat = -(-(asked.prompt_tokens + asked.output_tokens) // 16)
    lab = open_lab(asked, num_blocks=max(asked.seats) * per_seat + 1)
    points = measure(lab, asked)
    fixed, each = fitted([(point.seats, point.step_ms) for point in points])
    figures = {
        "machine": machine,
        "setting": lab.setting,
        "fit": {"fixed_ms": round(fixed, 3), "each_ms": round(each, 4)},
        "points": [asdict(point) for point in points],
    }
    flags.leave_behind(asked, PLACE, text(points, lab, asked, machine), figures)
    chart.write(asked.svg, picture(points, lab))


if __name__ == "__main__":
    main()
