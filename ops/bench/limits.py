"""What this machine can do at most: bytes read per second, and matrix products. The roof over every step.

    python -m ops.bench.limits [--write FILE] [--json FILE] [--svg FILE]

About two minutes. Reading: sums over memory of a few sizes, from one that fits a cache to one that does not.
Matrix products: oneDNN on weights that were re-laid once, `[M, K] @ [K, N]`, with the weights of 30 layers in turn, as
a step has them, and of one layer, as benchmarks like to have them. Compare within one run.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from ops.bench import chart, flags, page
from torch import Tensor

PLACE = "limits"
MEBIBYTE = 1 << 20
READ_SIZES_MIB = (16, 269, 1_024)
KINDS = ("bfloat16", "int8", "float32")
ROWS = (1, 16, 64, 256, 1_024)
SHAPE = (576, 3_072)
LAYERS = (1, 30)
_MIN_SECONDS = 0.15

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Reading:
    """GB per second (10^9 bytes), the best of several passes."""

    num_threads: int
    mebibytes: int
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class Peak:
    """One matrix product of `rows` rows. gflops: 10^9 multiplications and additions per second.

    num_layers: how many weights took turns; 30 of them do not fit a cache.
    """

    kind: str
    num_threads: int
    rows: int
    num_layers: int
    gflops: float


def best_seconds(work: Callable[[], object], *, least_s: float = _MIN_SECONDS) -> float:
    """The shortest of at least three passes that take `least_s` together; one pass before them is not counted."""
    work()
    took: list[float] = []
    while len(took) < 3 or sum(took) < least_s:
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return min(took)


def read_gb_per_s(num_bytes: int, num_threads: int, *, least_s: float = _MIN_SECONDS) -> float:
    """How fast memory is read: the better of two sums, of eight bytes at a time."""
    torch.set_num_threads(num_threads)
    memory = torch.ones(num_bytes // 8, dtype=torch.int64)
    views = (memory, memory.view(torch.float64))
    seconds = min(best_seconds(view.sum, least_s=least_s / len(views)) for view in views)
    return memory.numel() * 8 / seconds / 1e9


def kinds() -> tuple[str, ...]:
    """Of `KINDS`, those for which this build of torch has a product on re-laid weights."""
    has_int8 = "x86" in torch.backends.quantized.supported_engines
    return tuple(kind for kind in KINDS if torch._C._has_mkldnn and (kind != "int8" or has_int8))


def product(kind: str, weight: Tensor, rows: int) -> Product:
    """`[rows, K] -> [rows, N]` with a weight `[N, K]` that is laid out once for oneDNN. Raises ValueError."""
    if kind == "int8":
        packed = _packed_int8(weight)
        return lambda x: torch.ops.quantized.linear_dynamic(x, packed, True)
    if kind not in KINDS:
        raise ValueError(f"kind={kind!r} is not one of {', '.join(KINDS)}")
    laid = torch.ops.mkldnn._reorder_linear_weight(weight.to(getattr(torch, kind)), rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, laid, None, "none", [], "")


def _packed_int8(weight: Tensor) -> Any:
    """int8 per output row; activations are quantised in the product itself."""
    torch.backends.quantized.engine = "x86"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that these tensors will go; no other int8 product is public yet
        scales = weight.abs().amax(1) / 127
        quantised = torch.quantize_per_channel(
            weight, scales, torch.zeros(len(scales), dtype=torch.long), 0, torch.qint8
        )
        return torch.ops.quantized.linear_prepack(quantised, None)


def peak_gflops(
    kind: str, rows: int, num_layers: int, num_threads: int, *, shape: tuple[int, int] = SHAPE, least_s: float = 0.15
) -> float:
    """Each weight once a pass."""
    torch.set_num_threads(num_threads)
    inner, outer = shape
    draw = torch.Generator().manual_seed(rows)
    weights = [torch.randn(outer, inner, generator=draw) for _ in range(num_layers)]
    products = [product(kind, weight, rows) for weight in weights]
    # The int8 product takes float32 activations and quantises them itself.
    x = torch.randn(rows, inner, generator=draw).to(torch.bfloat16 if kind == "bfloat16" else torch.float32)

    passes = max(1, 8 // num_layers)

    def work() -> None:
        for _ in range(passes):
            for multiply in products:
                multiply(x)

    seconds = best_seconds(work, least_s=least_s)
    return 2 * rows * inner * outer * num_layers * passes / seconds / 1e9


def measure(asked: argparse.Namespace) -> tuple[list[Reading], list[Peak]]:
    """All of it, one after the other."""
    readings, peaks = [], []
    for num_threads in asked.threads:
        for size in asked.sizes_mib:
            readings.append(Reading(num_threads, size, round(read_gb_per_s(size * MEBIBYTE, num_threads), 2)))
            flags.say(f"read {size} MiB with {num_threads} threads: {readings[-1].gb_per_s:.1f} GB/s")
        for kind in kinds():
            for rows in asked.rows:
                for num_layers in LAYERS:
                    gflops = peak_gflops(kind, rows, num_layers, num_threads)
                    peaks.append(Peak(kind, num_threads, rows, num_layers, round(gflops, 1)))
            flags.say(f"{kind} with {num_threads} threads: {peaks[-1].gflops:,.0f} GFLOP/s")
    return readings, peaks


def text(readings: Sequence[Reading], peaks: Sequence[Peak], machine: str) -> str:
    sizes = list(dict.fromkeys(reading.mebibytes for reading in readings))
    threads = list(dict.fromkeys(reading.num_threads for reading in readings))
    read = {(one.num_threads, one.mebibytes): one.gb_per_s for one in readings}
    rows = list(dict.fromkeys(peak.rows for peak in peaks))
    gflops = {(one.kind, one.num_threads, one.num_layers, one.rows): one.gflops for one in peaks}
    return "\n\n".join(
        (
            page.paragraph(f"`python -m ops.bench.limits`, torch {torch.__version__}. {machine}. Memory read, GB/s:"),
            page.table(
                ["threads", *(f"{size:,} MiB" for size in sizes)],
                [[str(n), *(f"{read[n, size]:.0f}" for size in sizes)] for n in threads],
            ),
            page.paragraph(
                f"Matrix products with weights of {SHAPE[0]} × {SHAPE[1]}, GFLOP/s, by rows in a step; weights of 30",
                "layers in turn, and of one layer that stays in the cache:",
            ),
            page.table(
                ["numbers", "threads", "layers", *(f"{number:,}" for number in rows)],
                [
                    [kind, str(n), str(layers), *(f"{gflops[kind, n, layers, number]:,.0f}" for number in rows)]
                    for kind in dict.fromkeys(peak.kind for peak in peaks)
                    for n in threads
                    for layers in LAYERS
                ],
            ),
        )
    )


def picture(readings: Sequence[Reading], peaks: Sequence[Peak], machine: str) -> chart.Chart:
    """Both, for as many threads as were tried last."""
    num_threads = peaks[-1].num_threads
    speed = tuple(
        chart.Series(
            f"{kind}, {layers} {'layer' if layers == 1 else 'layers'}",
            tuple(
                (p.rows, p.gflops)
                for p in peaks
                if (p.kind, p.num_threads, p.num_layers) == (kind, num_threads, layers)
            ),
        )
        for kind in KINDS
        for layers in LAYERS
    )
    reads = tuple(
        chart.Series(f"{n} threads", tuple((r.mebibytes, r.gb_per_s) for r in readings if r.num_threads == n))
        for n in dict.fromkeys(reading.num_threads for reading in readings)
    )
    sizes = tuple((float(r.mebibytes), f"{r.mebibytes}") for r in readings if r.num_threads == num_threads)
    ticks = tuple(
        (float(p.rows), f"{p.rows}")
        for p in peaks
        if (p.kind, p.num_threads, p.num_layers) == (KINDS[0], num_threads, 1)
    )
    return chart.Chart(
        "What the machine can do",
        machine,
        (
            chart.Panel("memory read", "MiB", "GB/s", reads, sizes, log_x=True),
            chart.Panel(
                f"matrix products, {num_threads} threads", "rows", "GFLOP/s", speed, ticks, log_x=True, log_y=True
            ),
        ),
    )


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = flags.parser(__doc__)
    flags.add_picture(parser)
    cores = tuple(sorted({1, torch.get_num_threads()}))
    parser.add_argument("--threads", type=flags.listed(flags.positive), default=cores, metavar="1,2")
    parser.add_argument("--sizes-mib", type=flags.listed(flags.positive), default=READ_SIZES_MIB, metavar="16,269")
    parser.add_argument("--rows", type=flags.listed(flags.positive), default=ROWS, metavar="64,1024")
    return parser.parse_args(words)


@flags.told()
def main(words: Sequence[str] | None = None) -> None:
    asked = arguments(words)
    page.check_place(asked.write, PLACE)
    machine = page.machine()
    with torch.inference_mode():
        readings, peaks = measure(asked)
    figures = {"machine": machine, "read": [asdict(r) for r in readings], "products": [asdict(p) for p in peaks]}
    flags.leave_behind(asked, PLACE, text(readings, peaks, machine), figures)
    chart.write(asked.svg, picture(readings, peaks, machine))


if __name__ == "__main__":
    main()
