"""The sampler again, as slowly and plainly as possible: Python integers and floats, every token, full sorts."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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


def reference_allowed(
    logits: Sequence[float], temperature: float, top_k: int, top_p: float, min_p: float = 0.0
) -> list[int]:
    """Token ids that may be drawn, most probable first."""
    order = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    top = logits[order[0]] / temperature
    order = [token_id for token_id in order if math.exp(logits[token_id] / temperature - top) >= min_p]
    if 0 < top_k < len(logits):
        order = order[:top_k]
    weights = [math.exp(logits[token_id] / temperature - top) for token_id in order]
    total, before, allowed = sum(weights), 0.0, []
    for token_id, weight in zip(order, weights, strict=True):
        if allowed and before >= top_p * total:
            break
        allowed.append(token_id)
        before += weight
    return allowed


def float32(value: float) -> float:
    """Rounded as where the sampler writes a logit back."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


@dataclass(frozen=True)
class Rules:
    """A job's logits processors, and what it has said so far."""

    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    allowed: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    min_tokens: int = 0
    end_ids: Sequence[int] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0


def reference_processed(logits: Sequence[float], rules: Rules) -> list[float]:
    """Every token by itself, in the order that is documented."""
    return [_processed(token_id, logit, rules) for token_id, logit in enumerate(logits)]


def _processed(token_id: int, logit: float, rules: Rules) -> float:
    if rules.allowed and token_id not in rules.allowed:
        return -math.inf
    for *beginning, last in rules.bad_words:
        said = list(rules.output)
        if token_id == last and said[len(said) - len(beginning) :] == beginning and len(beginning) <= len(said):
            return -math.inf
    if len(rules.output) < rules.min_tokens and token_id in rules.end_ids:
        return -math.inf
    logit = float32(logit + rules.bias.get(token_id, 0.0))
    count = list(rules.output).count(token_id)
    if count or token_id in rules.prompt:
        logit = logit / rules.repetition if logit > 0 else logit * rules.repetition
    return float32(logit - rules.frequency * count - rules.presence * (count > 0))


def reference_sample(
    logits: Sequence[float],
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    choice: int = 0,
    position: int = 0,
    rules: Rules | None = None,
) -> int | None:
    """The token; None if the rules leave none."""
    if rules is not None:
        logits = reference_processed(logits, rules)
    if max(logits) == -math.inf:
        return None
    if temperature == 0.0:
        return max(range(len(logits)), key=lambda token_id: (logits[token_id], -token_id))
    allowed = reference_allowed(logits, temperature, top_k, top_p, min_p)
    return max(
        allowed,
        key=lambda token_id: logits[token_id] / temperature + reference_noise(seed, choice, position, token_id),
    )
