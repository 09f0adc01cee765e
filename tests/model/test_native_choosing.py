"""Tokens drawn by the kernels are the ones that `sample` draws from the same logits."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from native_kernels import HERE, drawn, team
from torch import Tensor

from jitney_worker.engine.protocol import RowFailure, Sampled
from jitney_worker.model.choice import served_config
from jitney_worker.model.choosing import choose
from jitney_worker.model.config import ModelConfig, Multipliers
from jitney_worker.model.native.decoder import NativeDecoder
from jitney_worker.model.noise import gumbel
from jitney_worker.model.processors import Edits
from jitney_worker.model.sampler import SamplingRow, sample
from jitney_worker.model.weights import DecoderWeights

HIDDEN = 64
"""A row with a single 1 has a mean square of 1/64: its norm is 8 there and 0 elsewhere, exactly."""


def decoder_of(
    directory: Path,
    head: Tensor,
    *,
    level: str = HERE[0],
    num_threads: int = 2,
    divisor: float = 1.0,
    int8: bool = False,
) -> NativeDecoder:
    """No layers: hidden states become logits at once. head: [vocab, HIDDEN]."""
    config = served_config(directory)
    assert isinstance(config, ModelConfig)
    config = dataclasses.replace(
        config,
        hidden_size=HIDDEN,
        vocab_size=len(head),
        rms_norm_eps=0.0,
        multipliers=Multipliers(logits=divisor),
    )
    weights = DecoderWeights(head, (), torch.ones(HIDDEN), head)
    return NativeDecoder(config, weights, team(level, num_threads), quantised=int8)


def saying(directory: Path, logits: Tensor, level: str = HERE[0], num_threads: int = 2) -> tuple[NativeDecoder, Tensor]:
    """A decoder and hidden states that give these float32 logits [up to 64, vocab], to the last bit."""
    head = torch.zeros(logits.shape[1], HIDDEN)
    head[:, : len(logits)] = logits.T / 8
    return decoder_of(directory, head, level=level, num_threads=num_threads), torch.eye(HIDDEN)[: len(logits)]


_WIDE = st.floats(-40, 40, width=32).filter(lambda logit: abs(logit) > 1e-30)  # an eighth of it is a whole float32 too
_LOGITS = st.one_of(st.sampled_from([-30.0, -3.0, 0.0, 1.0, 1.5, 2.0]), _WIDE)


@st.composite
def _tables(draw: st.DrawFn) -> Tensor:
    """A few rows of logits with many ties, over vocabularies that fill no panel, one, or a part of the next."""
    vocab_size = draw(st.sampled_from([1, 2, 15, 31, 32, 33, 64, 70]))
    rows = st.lists(_LOGITS, min_size=vocab_size, max_size=vocab_size)
    return torch.tensor(draw(st.lists(rows, min_size=1, max_size=4)), dtype=torch.float32)


_ROWS = st.builds(
    SamplingRow,
    temperature=st.sampled_from([0.0, 0.001, 0.3, 0.8, 1.0, 2.0]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 40, 2**32 + 1]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.95, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-6, 0.05, 0.7, 1.0]),
    key=st.integers(-(2**63), 2**63 - 1),
)


@pytest.mark.parametrize("level", HERE)
@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(logits=_tables(), rows=st.lists(_ROWS, min_size=4, max_size=4))
def test_every_row_gets_the_token_that_the_sampler_draws(
    tiny_llama: Path, level: str, logits: Tensor, rows: list[SamplingRow]
) -> None:
    decoder, hidden = saying(tiny_llama, logits, level)
    assert torch.equal(decoder.logits(hidden), logits)
    own = rows[: len(logits)]
    assert choose(decoder, hidden, own) == sample(logits, own)


@pytest.mark.parametrize("temperature", [0.2, 0.8, 1.5])
@pytest.mark.parametrize("shape", ["peaked", "flat", "far"])
def test_large_vocabularies_are_drawn_from_as_the_sampler_does(
    tiny_llama: Path, shape: str, temperature: float
) -> None:
    """64 rows of every filter at once. far: most of the probability lies beyond what the noise reaches."""
    spread = {"peaked": 4.0, "flat": 0.3, "far": 0.1}[shape]
    logits = drawn(64, 50_003, seed=3) * spread
    if shape == "far":
        logits[:, ::7] += 11.5 * temperature
        logits[:, 78] += 20.0 * temperature
    rows = [
        SamplingRow(
            temperature=temperature,
            top_k=(0, 50, 30_000, 0)[i % 4],
            top_p=(1.0, 0.95, 0.9999, 0.5)[i // 4 % 4],
            min_p=(0.0, 0.01)[i // 16 % 2],
            key=i * 7_919,
        )
        for i in range(64)
    ]
    decoder, hidden = saying(tiny_llama, logits)
    found = choose(decoder, hidden, rows)
    assert found == sample(decoder.logits(hidden), rows)
    assert len({one.token_id for one in found if isinstance(one, Sampled)}) > 1


def test_what_no_noise_can_reach_counts_in_the_share_that_top_p_keeps(tiny_llama: Path) -> None:
    """Behind the second token lie 49,998 others: only with their weight does top_p reach it."""
    logits = torch.full((1, 50_000), -20.0)
    logits[0, :2] = torch.tensor([0.0, -9.5])
    keys = torch.arange(400_000)
    noise = [gumbel(keys, torch.full_like(keys, token_id)) for token_id in (0, 1)]
    key = int((noise[1] - noise[0] > 9.5).nonzero()[0])
    decoder, hidden = saying(tiny_llama, logits)
    for top_p, wanted in ((0.9999, 1), (0.9998, 0)):
        row = SamplingRow(temperature=1.0, top_k=49_999, top_p=top_p, key=key)
        assert choose(decoder, hidden, [row]) == sample(logits, [row]) == [Sampled(wanted, None)]


@pytest.mark.parametrize("level", HERE)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("ids", [(5, 37), (31, 32), (100, 999), (500, 501, 640), (0, 992), (998, 999)])
def test_of_equal_logits_the_lowest_id_wins_wherever_they_lie(
    tiny_llama: Path, level: str, num_threads: int, ids: tuple[int, ...]
) -> None:
    """Within a panel of 32, in two, and in panels that two threads see."""
    logits = torch.full((3, 1_000), -2.0)
    logits[:, ids] = 3.0
    decoder, hidden = saying(tiny_llama, logits, level, num_threads)
    for _ in range(5):
        assert choose(decoder, hidden, [SamplingRow()] * 3) == [Sampled(ids[0], None)] * 3


@pytest.mark.parametrize("int8", [False, True], ids=["whole", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", HERE)
def test_greedy_is_the_argmax_of_the_logits(tiny_llama: Path, level: str, dtype: torch.dtype, int8: bool) -> None:
    decoder = decoder_of(tiny_llama, drawn(5_003, HIDDEN, seed=1, dtype=dtype), level=level, int8=int8)
    hidden = drawn(64, HIDDEN, seed=2)
    expected = decoder.logits(hidden).argmax(dim=-1).tolist()
    for num_rows in (1, 3, 17, 64):
        found = choose(decoder, hidden[:num_rows], [SamplingRow()] * num_rows)
        assert found == [Sampled(token_id, None) for token_id in expected[:num_rows]]
    assert len(set(expected)) > 40


@pytest.mark.parametrize(
    "row", [SamplingRow(), SamplingRow(temperature=0.8, top_p=0.9, key=3)], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("level", HERE)
def test_rows_without_sound_logits_fail_alone(tiny_llama: Path, level: str, row: SamplingRow) -> None:
    """3e38 times 8 is beyond float32."""
    head = drawn(100, HIDDEN, seed=4)
    head[:, 1:5] = 0.0
    head[99, 1] = 3e38
    head[:, 2] = head[40, 3] = -3e38
    hidden = torch.eye(HIDDEN)[[0, 1, 5, 2, 6, 3, 7, 8]]
    hidden[6, 63] = math.nan
    decoder = decoder_of(tiny_llama, head, level=level)
    found = choose(decoder, hidden, [row] * len(hidden))
    assert found == sample(decoder.logits(hidden), [row] * len(hidden))
    words = {i: one.message.split(" among")[0] for i, one in enumerate(found) if isinstance(one, RowFailure)}
    said = "the model produced "
    assert words == {1: f"{said}+Inf", 3: f"{said}only -Inf", 6: f"{said}NaN"}


def test_rows_with_edits_and_logprobs_stand_where_they_stood(tiny_llama: Path) -> None:
    logits = drawn(12, 300, seed=5) * 3
    kinds = (
        SamplingRow(),
        SamplingRow(num_logprobs=2),
        SamplingRow(temperature=1.0, key=1),
        SamplingRow(temperature=1.0, key=1, edits=Edits(forbidden=torch.arange(0, 300, 2))),
    )
    rows = [dataclasses.replace(kinds[i * 7 % 4], key=i) for i in range(12)]
    decoder, hidden = saying(tiny_llama, logits)
    found = choose(decoder, hidden, rows)
    assert found == sample(logits, rows)
    assert sum(isinstance(one, Sampled) and one.logprobs is not None for one in found) == 3
    assert choose(decoder, hidden[:0], []) == []


def test_logits_are_divided_before_they_are_compared(tiny_llama: Path) -> None:
    """Granite's divisor: two neighbours become one number, and of equal ones the lowest id wins."""
    low = torch.tensor(13.0)
    high = torch.nextafter(low, torch.tensor(14.0))
    assert low / 6 == high / 6
    head = torch.zeros(64, HIDDEN)
    head[50, 0], head[9, 0] = high / 8, low / 8
    decoder, hidden = decoder_of(tiny_llama, head, divisor=6.0), torch.eye(HIDDEN)[:1]
    assert decoder.logits(hidden).argmax() == 9
    assert choose(decoder, hidden, [SamplingRow()]) == [Sampled(9, None)]
    drawn_rows = [SamplingRow(temperature=0.5, key=key) for key in range(20)]
    for row in drawn_rows:
        assert choose(decoder, hidden, [row]) == sample(decoder.logits(hidden), [row])
