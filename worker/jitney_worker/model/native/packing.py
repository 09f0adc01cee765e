"""Weights as the kernels take them: re-laid once into panels of 32 columns, for reading in one stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jitney_worker.model.native.library import INT8, KINDS, LANES, PANEL, Matrix, Team, address


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix in panels, with all the memory that `matrix` points into."""

    matrix: Matrix
    kept: tuple[Tensor | None, ...]


def pack(
    team: Team, weight: Tensor, bias: Tensor | None = None, *, order: Tensor | None = None, quantised: bool = False
) -> Packed:
    """weight [columns, depth], float32 or bfloat16 on the CPU; bias [columns].

    order: which row of `weight` each column of the result is, -1 for zeros. quantised: to int8, one scale a column.
    """
    if order is None:
        order = torch.arange(weight.shape[0])
    num_columns, depth = len(order), weight.shape[1]
    kind, scales, sums = KINDS[weight.dtype], None, None
    if quantised:
        kind, (weight, scales, sums) = INT8, quantise(team, weight)
        scales, sums = _ordered(scales, order), _ordered(sums, order)
    panels = torch.empty(team.library.packed_size(kind, num_columns, depth), dtype=torch.uint8)
    source = weight.contiguous()
    team.library.pack(team.threads, kind, address(source), num_columns, depth, address(order), address(panels))
    bias = None if bias is None else _ordered(bias.float(), order)
    matrix = Matrix(address(panels), address(bias), address(scales), address(sums), num_columns, depth, kind)
    return Packed(matrix, (panels, bias, scales, sums))


def quantise(team: Team, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Signed bytes [columns, depth], float32 scales and int32 sums of the bytes, each [columns].

    Symmetric: a column's largest magnitude is 127. A column with a number that is not finite has a scale of NaN.
    """
    columns, depth = weight.shape
    given, whole = weight.contiguous(), torch.empty(columns, depth, dtype=torch.int8)
    scales, sums = torch.empty(columns), torch.empty(columns, dtype=torch.int32)
    kind = KINDS[weight.dtype]
    team.library.quantise(team.threads, kind, address(given), columns, depth, *map(address, (whole, scales, sums)))
    return whole, scales, sums


def linear(team: Team, rows: Tensor, packed: Packed) -> Tensor:
    """rows [R, depth] times the matrix, plus its bias: float32 [R, columns].

    rows: of the dtype that was packed; float32 or bfloat16 where that was quantised.
    """
    matrix = packed.matrix
    assert matrix.kind in (KINDS[rows.dtype], INT8), "rows are of another kind than the weights"
    assert rows.shape[1] == matrix.depth, "rows are of another width than the weights"
    given, out = rows.contiguous(), torch.empty(len(rows), matrix.num_columns)
    kind = KINDS[rows.dtype]
    team.library.linear(team.threads, kind, matrix, team.rooms, address(given), len(rows), address(out))
    return out


def interleaved(inner: int) -> Tensor:
    """The order that lays 16 rows of the gate beside the same 16 of the other half; weight rows: gate, then up."""
    groups = -(-inner // LANES)
    columns = torch.arange(groups * LANES).view(groups, LANES)
    gate = torch.where(columns < inner, columns, -1)
    up = torch.where(columns < inner, columns + inner, -1)
    return torch.stack((gate, up), dim=1).reshape(-1)


def padded(vector: Tensor, to: int = PANEL) -> Tensor:
    """float32, filled up with zeros to a multiple."""
    missing = -len(vector) % to
    return torch.nn.functional.pad(vector.float(), (0, missing)).contiguous()


def _ordered(values: Tensor, order: Tensor) -> Tensor:
    """In the order of the columns, filled up with zeros to whole panels."""
    taken = torch.where(order >= 0, values[order.clamp(min=0)], torch.zeros((), dtype=values.dtype))
    return torch.nn.functional.pad(taken, (0, -len(taken) % PANEL)).contiguous()
