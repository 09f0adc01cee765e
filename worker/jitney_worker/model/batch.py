"""One step as tensors: which tokens, at which positions, into which slots, and which rows sample."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from jitney_worker.engine.protocol import ScheduledSequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """A row with several query tokens: flat tokens [first, first + stop - start), positions [start, stop)."""

    row: int
    first: int
    start: int
    stop: int

    @property
    def tokens(self) -> slice:
        """Where its tokens lie in the flat batch."""
        return slice(self.first, self.first + self.stop - self.start)


@dataclass(frozen=True, slots=True)
class StepBatch:
    """T tokens of B rows. Rows with one query token come first, so that they are a slice and one batched call.

    token_ids, positions, slots: [T].
    block_table: [B, most blocks of a row], padded with the scratch block.
    seq_lens: [B], tokens in the cache after this step.
    row_firsts: [B + 1], flat index of each row's first token, and T.
    num_decodes: leading rows with one query token (token i belongs to row i).
    longest_decode: the most tokens one of those has in the cache; 0 if there are none.
    fresh_blocks: blocks whose first slot is written in this step.
    sample_at: [R], flat index of each sampling sequence's last token, in the scheduler's order.
    first_at: flat index of each sequence's first token, in the scheduler's order.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    block_table: Tensor
    seq_lens: Tensor
    row_firsts: Tensor
    num_decodes: int
    longest_decode: int
    chunks: tuple[Chunk, ...]
    fresh_blocks: Tensor
    sample_at: Tensor
    first_at: tuple[int, ...]


def step_batch(
    scheduled: ListLike[ScheduledSequence], *, block_size: int, scratch_block: int, device: torch.device
) -> StepBatch:
    """Lay a step out. Python touches each row once; what is per token is numpy."""
    order = sorted(range(len(scheduled)), key=lambda i: scheduled[i].stop - scheduled[i].start > 1)
    rows = [scheduled[i] for i in order]
    starts = np.array([row.start for row in rows], dtype=np.int64)
    stops = np.array([row.stop for row in rows], dtype=np.int64)
    lengths = stops - starts
    firsts = np.cumsum(lengths) - lengths
    num_decodes = int(np.count_nonzero(lengths == 1))

    token_ids: list[int] = []
    for row in rows:
        token_ids += row.sequence.token_ids[row.start : row.stop]
    row_of_token = np.repeat(np.arange(len(rows)), lengths)
    positions = np.arange(len(token_ids)) - np.repeat(firsts - starts, lengths)
    table = _block_table(rows, -(-stops // block_size), scratch_block)
    offsets = positions % block_size
    blocks = table[row_of_token, positions // block_size]
    last_token = np.empty(len(rows), dtype=np.int64)
    last_token[order] = firsts + lengths - 1
    first_token = np.empty_like(last_token)
    first_token[order] = firsts

    def tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return StepBatch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=tensor(positions),
        slots=tensor(blocks * block_size + offsets),
        block_table=tensor(table),
        seq_lens=tensor(stops),
        row_firsts=tensor(np.append(firsts, len(token_ids))),
        num_decodes=num_decodes,
        longest_decode=int(stops[:num_decodes].max(initial=0)),
        chunks=tuple(Chunk(i, int(firsts[i]), rows[i].start, rows[i].stop) for i in range(num_decodes, len(rows))),
        fresh_blocks=tensor(blocks[offsets == 0]),
        sample_at=tensor(last_token[[i for i, one in enumerate(scheduled) if one.samples]]),
        first_at=tuple(first_token.tolist()),
    )


def _block_table(
    rows: list[ScheduledSequence], num_blocks: np.ndarray[tuple[int, ...], np.dtype[np.int64]], scratch_block: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    table = np.full((len(rows), int(num_blocks.max())), scratch_block, dtype=np.int64)
    for i, row in enumerate(rows):
        table[i, : num_blocks[i]] = row.sequence.block_table[: num_blocks[i]]
    return table
