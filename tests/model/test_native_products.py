"""Matrix products of the kernels: against float64, and against integers where they are exact."""

from __future__ import annotations

import math

import pytest
import torch
from native_kernels import HERE, drawn, team
from torch import Tensor

from jitney_worker.model.native.library import Team
from jitney_worker.model.native.packing import interleaved, linear, pack, quantise

ROWS = (*range(1, 41), 225, 300)
SHAPES = ((1, 1), (31, 3), (32, 64), (33, 65), (50, 77), (100, 128), (259, 513))
"""(columns, depth): fewer than a panel, whole ones, and one more; even and odd depths."""

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(params=HERE)
def own_team(request: pytest.FixtureRequest) -> Team:
    return team(request.param)


def expected(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return rows.double() @ weight.double().T + (0.0 if bias is None else bias.double())


def assert_close(found: Tensor, wanted: Tensor, rows: Tensor, weight: Tensor) -> None:
    """Within the error of a float32 sum: its length times the rounding of the sum of magnitudes."""
    bound = rows.double().abs() @ weight.double().abs().T * (weight.shape[1] ** 0.5 * 2**-23) + 1e-6
    assert found.dtype == torch.float32
    assert ((found.double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products_of_any_number_of_rows_equal_float64(
    own_team: Team, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    weight, bias = drawn(*shape, seed=1, dtype=dtype), drawn(shape[0], seed=2)
    packed = pack(own_team, weight, bias)
    for num_rows in ROWS:
        rows = drawn(num_rows, shape[1], seed=num_rows, dtype=dtype)
        assert_close(linear(own_team, rows, packed), expected(rows, weight, bias), rows, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_column_is_the_row_that_the_order_names_and_zero_for_minus_one(own_team: Team, dtype: torch.dtype) -> None:
    weight, bias, rows = drawn(40, 21, seed=1, dtype=dtype), drawn(40, seed=2), drawn(5, 21, seed=3, dtype=dtype)
    order = torch.tensor([39, -1, 0, 0, *range(38, 0, -1), -1, 7])
    found = linear(own_team, rows, pack(own_team, weight, bias, order=order))
    whole = linear(own_team, rows, pack(own_team, weight, bias))
    assert torch.equal(found[:, order >= 0], whole[:, order[order >= 0]])
    assert torch.equal(found[:, order < 0], torch.zeros(5, 2))


@pytest.mark.parametrize("inner", [16, 17, 40, 64])
def test_gate_and_up_lie_beside_each_other_by_sixteen(inner: int) -> None:
    order = interleaved(inner)
    gate, up = order.view(-1, 2, 16).unbind(1)
    for half, first in ((gate.reshape(-1), 0), (up.reshape(-1), inner)):
        assert half[:inner].tolist() == list(range(first, first + inner))
        assert (half[inner:] == -1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_quantised_products_equal_integers_exactly(own_team: Team, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Bytes are multiplied without rounding: only the scales come in float32, and in one order."""
    weight, bias = drawn(*shape, seed=4, dtype=dtype), drawn(shape[0], seed=5)
    whole, scales, sums = quantise(own_team, weight)
    packed = pack(own_team, weight, bias, quantised=True)
    assert torch.equal(sums, whole.sum(dim=1, dtype=torch.int32))
    for num_rows in (1, 2, 13, 14, 15, 40, 300):
        rows = drawn(num_rows, shape[1], seed=num_rows, dtype=dtype)
        bytes_of, row_scales = quantised_rows(rows)
        product = (bytes_of.long() @ whole.long().T).int().float()
        wanted = product * (scales * row_scales[:, None]) + bias
        assert torch.equal(linear(own_team, rows, packed), wanted)


def quantised_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """As the kernels do it: by the largest magnitude of the row, rounded to the nearest, ties to even."""
    scales = rows.float().abs().amax(dim=1) / 127.0
    return (rows.float() * (1.0 / scales)[:, None]).round().to(torch.int8), scales


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_quantised_weight_is_half_a_step_from_the_weight_at_most(own_team: Team, dtype: torch.dtype) -> None:
    weight = drawn(70, 90, seed=6, dtype=dtype)
    weight[3] = 0.0
    whole, scales, _ = quantise(own_team, weight)
    assert (whole.abs().amax(dim=1) == 127).sum() == 69
    assert (scales[3], whole[3].any()) == (0.0, False)
    error = (whole.double() * scales[:, None].double() - weight.double()).abs()
    assert (error <= scales[:, None].double() * 0.5001).all()


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_spoils_itself_alone(own_team: Team, bad: float, quantised: bool) -> None:
    """int8 has no byte for NaN: the row's scale says it."""
    rows, weight = drawn(20, 70, seed=7), drawn(40, 70, seed=8)
    packed = pack(own_team, weight, quantised=quantised)
    sound = linear(own_team, rows, packed)
    rows[11, 69] = bad
    found = linear(own_team, rows, packed)
    assert not found[11].isfinite().any()
    others = torch.arange(20) != 11
    assert torch.equal(found[others], sound[others])


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_quantised_column_that_is_not_finite_comes_out_so(own_team: Team, bad: float) -> None:
    weight = drawn(40, 70, seed=8)
    weight[17, 5] = bad
    found = linear(own_team, drawn(3, 70, seed=7), pack(own_team, weight, quantised=True))
    assert found.isnan().any(dim=0).nonzero().tolist() == [[17]]


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_neither_neighbours_nor_threads_change_a_bit_of_a_row(own_team: Team, kind: str) -> None:
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    rows, weight = drawn(300, 259, seed=9, dtype=dtype), drawn(150, 259, seed=10, dtype=dtype)
    packed = pack(own_team, weight, quantised=kind == "int8")
    whole = linear(own_team, rows, packed)
    for size in (1, 2, 3, 5, 14, 15, 64, 299):
        parts = [linear(own_team, part, packed) for part in rows[: 2 * size].split(size)]
        assert torch.equal(torch.cat(parts), whole[: 2 * size])
    for num_threads in (1, 3):
        assert torch.equal(linear(team(own_team.library.level, num_threads), rows, packed), whole)
