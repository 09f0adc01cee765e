"""Before a foreign model serves: does it answer the same alone as in chunks, and alone as in company?

Two short made-up sequences run through the paged cache in chunks and single tokens, mixed with each other, and
through the model's own attention, whole and each by itself. A state outside attention (recurrence, convolution,
indexer), positions counted otherwise and masks misunderstood all show as different logits. What depends on the
farthest position in the batch, as some rotary embeddings do, shows as other keys beside a neighbour far away; what
is counted from the length of transformers' own cache, as other queries late in the context.
The cost is some fifteen short passes at each start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from jitney.errors import ModelError
from jitney_worker.engine.protocol import ScheduledSequence
from jitney_worker.engine.sequence import Sequence, SequenceId, SequenceParams, SequenceRequest
from jitney_worker.model.attention import TorchAttention
from jitney_worker.model.batch import step_batch
from jitney_worker.model.cache import KVCache
from jitney_worker.model.decoder import Decoder
from jitney_worker.model.paging import SERVING, visited_by
from jitney_worker.model.pretended_cache import pretended_cache

BLOCK_SIZE = 4
LENGTHS = (21, 13)
STEPS = (
    ((0, 0, 9),),
    ((0, 9, 10), (1, 0, 5)),
    ((0, 10, 11), (1, 5, 6)),
    ((0, 11, 14), (1, 6, 7)),
    ((0, 14, 15), (1, 7, 9)),
    ((0, 15, 18), (1, 9, 10)),
    ((0, 18, 19), (1, 10, 12)),
    ((0, 19, 21), (1, 12, 13)),
)
"""Of each step: (sequence, start, stop). So short that a convolution over three tokens misses some in each."""

FIRST_CHUNKS = (9, 5)
"""Tokens of each sequence that its first step computes: nothing can be lost before them."""

TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
"""Largest median relative error of the logits after the first chunks. Rounding stays well below, also where it sends
some tokens to other experts; what is lost with a state, or counted otherwise, lies well above."""


class PositionsByCache(ModelError):
    """The model does not answer late in its context as it does with transformers' cache."""


class Tried(Decoder, Protocol):
    """A decoder made of a model of transformers."""

    @property
    def model(self) -> Any: ...

    @property
    def body(self) -> Any: ...

    def run_body(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Hidden states [T, hidden]; whoever visits answers the attention calls."""
        ...


def try_out(decoder: Tried, where: str) -> None:
    """Raise ModelError if the model does not pass. Called while its attention is paged, and leaves it so."""
    model = decoder.model
    name = f"{where}: {type(model).__name__}"
    sequences = _sequences(decoder.config.vocab_size)
    pages = _paged_logits(decoder, sequences, model.dtype, model.device)
    for ours, one, skip in zip(pages, sequences, FIRST_CHUNKS, strict=True):
        error = _error(ours[skip:], _own_logits(model, one)[skip:])
        if not error < TOLERANCE[model.dtype]:  # NaN is no pass either
            raise ModelError(
                f"{name} does not answer in chunks and in company as it does alone (relative error {error:.2g}): "
                f"it keeps a state outside of attention or counts positions in its own way"
            )
    last = decoder.config.max_model_len - 1
    if not all(_agree(_heard(decoder, [at]), _heard(decoder, [at, last]), model) for at in (5, last // 32)):
        raise ModelError(f"{name} computes a token's keys from the positions of other sequences too")
    if not _agree(_heard(decoder, [last]), _heard(decoder, [last], past=last), model):
        raise PositionsByCache(f"{name} counts positions in its own way, which shows late in its context")


def _sequences(vocab_size: int) -> list[Sequence]:
    """Token ids spread over the vocabulary, and blocks that lie apart."""
    made = []
    for number, length in enumerate(LENGTHS):
        ids = tuple((7 + 7_919 * (i + 31 * number)) % vocab_size for i in range(length))
        sequence = Sequence.of(SequenceRequest(SequenceId(f"{number}/0"), ids, SequenceParams(1), (0, 0.0, 0, number)))
        sequence.block_table = [len(LENGTHS) * block + number for block in range(-(-length // BLOCK_SIZE))]
        made.append(sequence)
    return made


def _paged_logits(
    decoder: Decoder, sequences: list[Sequence], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """[length, vocab] of each sequence, computed as `STEPS` says."""
    num_blocks = len(LENGTHS) * -(-max(LENGTHS) // BLOCK_SIZE)
    cache = KVCache(decoder.attention_layers, num_blocks, BLOCK_SIZE, dtype, device)
    attention = TorchAttention(cache)
    parts: list[list[Tensor]] = [[] for _ in sequences]
    for step in STEPS:
        scheduled = [ScheduledSequence(sequences[number], start, stop, True) for number, start, stop in step]
        batch = step_batch(scheduled, block_size=BLOCK_SIZE, scratch_block=num_blocks, device=device)
        logits = decoder.logits(decoder.forward(batch.token_ids, batch.positions, attention.plan(batch)))
        for (number, start, stop), last in zip(step, batch.sample_at.tolist(), strict=True):
            parts[number].append(logits[last + 1 - (stop - start) : last + 1])
    return [torch.cat(part) for part in parts]


def _own_logits(model: Any, sequence: Sequence) -> Tensor:
    """The model by itself: its own attention, its own positions, the sequence whole."""
    model.set_attn_implementation("eager")
    try:
        ids = torch.tensor([sequence.token_ids], device=model.device)
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
    finally:
        # Not what the model's configuration named before: of several models in one, the outer one may name nothing.
        model.set_attn_implementation(SERVING)
    return logits.float()


def _error(found: Tensor, expected: Tensor) -> float:
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


def _heard(decoder: Tried, positions: list[int], *, past: int | None = None) -> list[Tensor]:
    """Queries and keys of the first of some tokens at these positions, each of which attends to itself alone.

    past: the body is called as transformers does, with a cache of that length.
    """
    where = torch.tensor(positions, device=decoder.model.device)
    token_ids = torch.full_like(where, 3)
    listener = _Listener()
    with visited_by(listener):
        if past is None:
            decoder.run_body(token_ids, where)
        else:
            decoder.body(input_ids=token_ids[None], position_ids=where[None], **pretended_cache(decoder.body, past))
    if len(listener.heard) != 2 * len(decoder.attention_layers):
        raise ModelError(f"{type(decoder.model).__name__} does not send every pass through the attention interface")
    return listener.heard


def _agree(one: list[Tensor], other: list[Tensor], model: Any) -> bool:
    """Experts may change with the size of a batch where precision is low, hence thrice the tolerance."""
    tolerance = 3 * TOLERANCE[model.dtype]
    return all(bool((a - b).norm() <= tolerance * b.norm()) for a, b in zip(one, other, strict=True))


class _Listener:
    """Visitor that keeps the first token's queries and keys. Every token attends to itself alone."""

    def __init__(self) -> None:
        self.heard: list[Tensor] = []

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any]
    ) -> Tensor:
        self.heard += [query[0, :, 0].float(), key[0, :, 0].float()]
        return value[0].repeat_interleave(query.shape[1] // value.shape[1], dim=0).transpose(0, 1).flatten(1)
