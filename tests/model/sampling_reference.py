"""The sampler again, as slowly and plainly as possible: Python integers and floats, every token, full sorts."""

from __future__ import annotations

import math
from collections.abc import Sequence

MASK = 2**64 - 1
STRIDE = 0x9E3779B97F4A7C15


def split_mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def reference_bits(seed: int, choice: int, position: int, token_id: int) -> int:
    key = split_mix((seed + STRIDE) & MASK)
    key = split_mix((key + (choice + 1) * STRIDE) & MASK)
    key = split_mix((key + (position + 1) * STRIDE) & MASK)
    return split_mix((key + token_id * STRIDE) & MASK) >> 41


def reference_noise(seed: int, choice: int, position: int, token_id: int) -> float:
    uniform = (reference_bits(seed, choice, position, token_id) + 0.5) / 2**23
    return -math.log(-math.log(uniform))


def reference_allowed(logits: Sequence[float], temperature: float, top_k: int, top_p: float) -> list[int]:
    """Token ids that may be drawn, most probable first."""
    order = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    if 0 < top_k < len(logits):
        order = order[:top_k]
    top = logits[order[0]] / temperature
    weights = [math.exp(logits[token_id] / temperature - top) for token_id in order]
    total, before, allowed = sum(weights), 0.0, []
    for token_id, weight in zip(order, weights, strict=True):
        if allowed and before >= top_p * total:
            break
        allowed.append(token_id)
        before += weight
    return allowed


def reference_sample(
    logits: Sequence[float],
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    choice: int = 0,
    position: int = 0,
) -> int:
    if temperature == 0.0:
        return max(range(len(logits)), key=lambda token_id: (logits[token_id], -token_id))
    allowed = reference_allowed(logits, temperature, top_k, top_p)
    return max(
        allowed,
        key=lambda token_id: logits[token_id] / temperature + reference_noise(seed, choice, position, token_id),
    )
