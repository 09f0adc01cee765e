"""An overview as lines for a terminal, or for a file."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import ConsoleDimensions, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jitney.keys import BANDS
from jitney.overview import Overview, QueueNow, SeatNow, WorkerNow

BAR_WIDTH = 20
NUM_MOVES_SHOWN = 4
_KIND = {"joined": "took", "left": "left", "preempted": "was preempted from"}


def draw(overview: Overview, size: ConsoleDimensions, trouble: str = "") -> RenderableType:
    """A screen. trouble: why there is nothing newer."""
    parts: list[RenderableType] = []
    if trouble:
        parts.append(Text(f"{trouble}; what follows is older", style="bold red"))
    if not overview.queues:
        parts.append(Text("no queue is known yet: start a worker (jitney worker), or everything (jitney up)"))
    # Of the height: each worker has a border, a line of its own and the moves beside its seats.
    num_workers = sum(len(queue.workers) for queue in overview.queues)
    room = size.height - 3 - 4 * len(overview.queues) - (5 + NUM_MOVES_SHOWN) * num_workers
    num_seats = max(2, room // max(1, num_workers))
    # What nobody works for comes last: it may lie below the screen.
    for queue in sorted(overview.queues, key=lambda queue: not queue.workers):
        parts += [_heading(queue), _bands(queue)]
        parts += [_panel(worker, num_seats) for worker in queue.workers]
        if not queue.workers:
            parts.append(Text("no worker is alive; jobs wait for one", style="yellow"))
    return Group(*parts)


def _heading(queue: QueueNow) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{queue.name}", style="bold")
    text.append(f"   {queue.tokens_per_s:,.0f} tokens/s", style="bold green")
    text.append(f"   first token {_pair(queue.ttft_s)}   next {_pair(queue.itl_s)}")
    return text


def _bands(queue: QueueNow) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append("waiting  ")
    for band in BANDS:
        number = queue.waiting[band]
        text.append(f"{band} {number:,}  ", style="" if number else "dim")
        if number:
            text.append(f"(oldest {_seconds(queue.oldest_s[band])})  ", style="dim")
    text.append(f"later {queue.later:,}  returned {sum(queue.returned.values()):,}  ", style="dim")
    text.append(f"preempted {queue.num_preemptions:,}  taken over {queue.num_takeovers:,}  ")
    text.append(f"dead {queue.dead:,}", style="bold red" if queue.dead else "dim")
    return text


def _panel(worker: WorkerNow, num_seats: int) -> Panel:
    table = Table(expand=True, show_edge=False, pad_edge=False, box=None, header_style="dim")
    table.add_column("seat", justify="right", width=4)
    table.add_column("job", no_wrap=True, ratio=1)
    table.add_column("", width=8)
    table.add_column("", width=BAR_WIDTH)
    table.add_column("tokens", justify="right", width=11)
    table.add_column("/s", justify="right", width=6)
    for seat in worker.seats[:num_seats]:
        table.add_row(
            str(seat.number),
            _name(seat),
            Text(seat.phase, style="green" if seat.phase == "decode" else "yellow"),
            Text(_bar(seat)),
            f"{seat.num_output_tokens:,}/{seat.max_output_tokens:,}",
            _rate(seat),
        )
    num_free, num_hidden = worker.max_num_seqs - len(worker.seats), len(worker.seats) - num_seats
    rest = f"{num_hidden} more seats taken, " if num_hidden > 0 else ""
    table.add_row("", Text(f"{rest}{num_free} free", style="dim"), "", "", "", "")
    moves = Text("\n".join(_moves(worker)), style="dim", no_wrap=True, overflow="ellipsis")
    return Panel(Group(table, Text(_budget(worker), no_wrap=True, overflow="ellipsis"), moves), title=_title(worker))


def _moves(worker: WorkerNow) -> Iterator[str]:
    for move in worker.moves[-NUM_MOVES_SHOWN:]:
        yield f"step {move['step']:>6}  {short(move['job'])} {_KIND[move['kind']]} seat {move['seat']}"


def plain(overview: Overview) -> list[str]:
    """The same without colour or width, everything in it: for files, mails and grep."""
    lines: list[str] = []
    for queue in overview.queues:
        lines.append(
            f"queue {queue.name}  model {queue.model}  {queue.tokens_per_s:.1f} tokens/s  "
            f"ttft {_pair(queue.ttft_s)}  itl {_pair(queue.itl_s)}"
        )
        waiting = "  ".join(f"{band} {queue.waiting[band]}" for band in BANDS)
        lines.append(
            f"  waiting  {waiting}  later {queue.later}  returned {sum(queue.returned.values())}  "
            f"running {sum(queue.running.values())}"
        )
        lines.append(f"  preempted {queue.num_preemptions}  taken over {queue.num_takeovers}  dead {queue.dead}")
        for worker in queue.workers:
            lines.append(f"  {_title(worker)}")
            lines.append(f"    {_budget(worker)}")
            lines += [
                f"    seat {seat.number}  {_name(seat)}  {seat.phase}  "
                f"{seat.num_output_tokens}/{seat.max_output_tokens} tokens  {_rate(seat)}/s"
                for seat in worker.seats
            ]
        if not queue.workers:
            lines.append("  no worker is alive")
    return lines or ["no queue is known yet"]


def _title(worker: WorkerNow) -> str:
    return (
        f"worker {worker.id}  {worker.state}  step {worker.step:,}  "
        f"{len(worker.seats)} of {worker.max_num_seqs} seats  {worker.tokens_per_s:,.1f} tokens/s"
    )


def _budget(worker: WorkerNow) -> str:
    used = worker.num_blocks - worker.num_free_blocks
    return (
        f"last step {worker.num_prefill_tokens} prefill + {worker.num_decode_tokens} decode "
        f"of {worker.max_num_batched_tokens} tokens   blocks {used} used ({worker.num_shared_blocks} shared), "
        f"{worker.num_cached_blocks} cached, {worker.num_free_blocks - worker.num_cached_blocks} free"
    )


def short(job: str) -> str:
    """The end of its id: what tells it from others of its queue."""
    return "…" + job[-8:]


def _name(seat: SeatNow) -> str:
    return seat.job if seat.choice == 0 else f"{seat.job} #{seat.choice}"


def _bar(seat: SeatNow) -> str:
    whole = seat.num_prompt_tokens if seat.phase == "prefill" else seat.max_output_tokens
    done = seat.num_computed_tokens if seat.phase == "prefill" else seat.num_output_tokens
    filled = 0 if whole <= 0 else min(BAR_WIDTH, round(BAR_WIDTH * done / whole))
    return "█" * filled + "░" * (BAR_WIDTH - filled)


def _rate(seat: SeatNow) -> str:
    return "-" if seat.tokens_per_s is None else f"{seat.tokens_per_s:.1f}"


def _pair(found: tuple[float, float] | None) -> str:
    """Median and 95th percentile."""
    return "-" if found is None else f"{_seconds(found[0])} (p95 {_seconds(found[1])})"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1_000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s" if seconds < 100 else f"{seconds:,.0f} s"
