"""From hidden states to embeddings: of the prompt's last token, or the mean of all; of length one either way."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from jitney_worker.engine.protocol import RowFailure, ScheduledSequence
from jitney_worker.engine.sequence import SequenceId
from jitney_worker.model.decoder import Decoder

BAD_STATES = RowFailure("bad_hidden_states", "the model produced NaN or Inf among the hidden states of this sequence")


def pooled_states(
    decoder: Decoder, hidden: Tensor, scheduled: Iterable[ScheduledSequence], first_at: Iterable[int]
) -> dict[SequenceId, bytes | RowFailure]:
    """As `ModelOutput.pooled`. hidden: of the whole step [T, hidden]; first_at: each sequence's first row of it.

    A mean is summed in float64, which the cutting of a prompt into steps does not show in: what is rounded away lies
    beyond a float32. Its number of tokens drops out, because only the direction is kept.
    """
    found: dict[SequenceId, bytes | RowFailure] = {}
    for one, first in zip(scheduled, first_at, strict=True):
        if one.pooling is not None:
            rows = hidden[first : first + one.stop - one.start]
            if one.pooling == "last":
                rows = rows[-1:]
            total = decoder.last_hidden_states(rows).sum(dim=0, dtype=torch.float64).cpu()
            if one.pooled:
                total += torch.from_numpy(np.frombuffer(one.pooled, dtype=np.float64).copy())
            found[one.sequence.id] = _embedding(total) if one.is_pooled else total.numpy().tobytes()
    return found


def _embedding(total: Tensor) -> bytes | RowFailure:
    """Of states [hidden]: of length one, float32, little-endian."""
    unit = (total / total.norm()).numpy().astype("<f4")
    return unit.tobytes() if np.isfinite(unit).all() else BAD_STATES
