"""Counter-based randomness: the noise of a token is a function of where it stands, of nothing that ran before.

    key   = mix(mix(mix(seed) + choice) + position)          one per sampled token, Python integers
    bits  = top 23 bits of mix(key + token_id * STRIDE)      one per candidate, int64 tensor
    noise = -ln(-ln((bits + 1/2) / 2**23))                   Gumbel, float64, between -2.82 and 16.64

So a job that is resumed, preempted or batched otherwise draws the same noise. mix is the finaliser of SplitMix64
(Steele, Lea and Flood 2014). Argmax over logit / T + noise samples the softmax (Gumbel-max); unlike inversion of the
cumulative distribution, a rounding error in one logit moves no boundary of another token.
"""

from __future__ import annotations

import torch
from torch import Tensor

NOISE_BITS = 23
NOISE_REACH = 19.5
"""More than the noise's whole range: a token further than this below the top of logit / T cannot win."""

STRIDE = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """A bijection of 64-bit integers whose output bits each depend on all input bits."""
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK
    return value ^ (value >> 31)


def noise_key(seed: int, choice: int, position: int) -> int:
    """Key of one sampled token, as a signed 64-bit integer. Any integers are taken, modulo 2**64.

    position: the token's index within its sequence, prompt included, so that it survives preemption and hand-over.
    """
    key = mix((seed + STRIDE) & _MASK)
    for counter in (choice, position):
        key = mix((key + (counter + 1) * STRIDE) & _MASK)
    return _signed(key)


def gumbel(keys: Tensor, token_ids: Tensor) -> Tensor:
    """Noise of tokens under their rows' keys: both int64 and of one shape; float64 of that shape.

    float64, because float32 logarithms differ in the last bit with where in a vector they are computed.
    """
    value = keys + token_ids * _signed(STRIDE)
    value = (value ^ _shifted(value, 30)) * _signed(_FIRST)
    value = (value ^ _shifted(value, 27)) * _signed(_SECOND)
    value = value ^ _shifted(value, 31)
    uniform = (_shifted(value, 64 - NOISE_BITS).double() + 0.5) * 2.0**-NOISE_BITS
    return uniform.log_().neg_().log_().neg_()


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's own copies the sign bit."""
    return torch.bitwise_right_shift(value, bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """The two's complement reading of a 64-bit pattern, which is what int64 tensors hold."""
    return value - (1 << 64) if value >> 63 else value
