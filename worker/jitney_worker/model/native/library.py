"""The compiled kernels as Python calls: structures laid out as in the C++ sources, and a team of threads.

ctypes lets the interpreter's lock go during a call, so that the event loop goes on while a step is computed.
"""

from __future__ import annotations

import ctypes
import weakref
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jitney_worker.model.native.build import NativeUnavailable, built, level

KINDS = {torch.float32: 0, torch.bfloat16: 1}
INT8 = 2
LANES = 16
PANEL = 32


class Matrix(Structure):
    """`Matrix` of product.hpp."""

    _fields_ = (
        ("panels", c_void_p),
        ("bias", c_void_p),
        ("scales", c_void_p),
        ("sums", c_void_p),
        ("num_columns", c_int32),
        ("depth", c_int32),
        ("kind", c_int32),
    )


class Layer(Structure):
    """`Layer` of decoder.hpp."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm")),
        ("window", c_int32),
        ("rotates", c_int32),
    )


class Model(Structure):
    """`Model` of decoder.hpp."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        ("norm", c_void_p),
        ("frequencies", c_void_p),
        ("embedding", c_void_p),
        ("head", Matrix),
        *(
            (name, c_int32)
            for name in (
                *("kind", "num_layers", "hidden", "intermediate"),
                *("num_heads", "num_kv_heads", "head_dim", "half_rotated"),
            )
        ),
        *(
            (name, c_float)
            for name in (
                *("eps", "rope_scale", "attention_scale"),
                *("embedding_multiplier", "residual_multiplier", "logits_divisor"),
            )
        ),
    )


class Plane(Structure):
    """`Plane` of attention.hpp: keys and values of one layer."""

    _fields_ = (("keys", c_void_p), ("values", c_void_p))


class Batch(Structure):
    """`Batch` of attention.hpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("token_ids", "positions", "slots", "block_table", "row_firsts")),
        *((name, c_int32) for name in ("num_tokens", "num_rows", "table_width", "block_size")),
    )


class Shape(Structure):
    """`Shape` of attention.hpp."""

    _fields_ = (
        *((name, c_int32) for name in ("num_heads", "num_kv_heads", "key_dim", "value_dim")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("window", "chunk")),
    )


class SamplingRow(Structure):
    """`SamplingRow` of sampling.hpp."""

    _fields_ = (
        ("top_p", c_double),
        ("key", c_int64),
        ("temperature", c_float),
        ("min_p_reach", c_float),
        ("top_k", c_int32),
    )


SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "jitney_sizes": (None, (POINTER(c_int64),)),
    "jitney_team": (c_void_p, (c_int32,)),
    "jitney_team_size": (c_int32, (c_void_p,)),
    "jitney_end_team": (None, (c_void_p,)),
    "jitney_rooms": (c_void_p, ()),
    "jitney_end_rooms": (None, (c_void_p,)),
    "jitney_packed_size": (c_int64, (c_int32, c_int64, c_int64)),
    "jitney_pack": (None, (c_void_p, c_int32, c_void_p, c_int64, c_int64, c_void_p, c_void_p)),
    "jitney_quantise": (None, (c_void_p, c_int32, c_void_p, c_int32, c_int64, c_void_p, c_void_p, c_void_p)),
    "jitney_linear": (None, (c_void_p, c_int32, POINTER(Matrix), c_void_p, c_void_p, c_int32, c_void_p)),
    "jitney_forward": (None, (c_void_p, POINTER(Model), c_void_p, POINTER(Batch), POINTER(Plane), c_void_p)),
    "jitney_logits": (None, (c_void_p, POINTER(Model), c_void_p, c_void_p, c_int32, c_void_p)),
    "jitney_choose": (
        None,
        (c_void_p, POINTER(Model), c_void_p, c_void_p, c_int32, POINTER(SamplingRow), c_void_p, c_void_p),
    ),
    "jitney_attend": (
        None,
        (
            *(c_void_p, c_int32, POINTER(Shape), POINTER(Plane), POINTER(Batch), c_void_p),
            *(c_void_p, c_void_p, c_void_p, c_void_p, c_void_p),
        ),
    ),
}


class Kernels:
    """One loaded library. Its C functions are attributes, by their names without `jitney_`."""

    def __init__(self, path: Path, level: str) -> None:
        """Raises NativeUnavailable if it cannot be loaded or lays its structures out otherwise."""
        self.path, self.level = path, level
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeUnavailable(f"{path} cannot be loaded: {error}") from error
        for name, (result, arguments) in SIGNATURES.items():
            function = getattr(self._library, name, None)
            if function is None:
                raise NativeUnavailable(f"{path} is no library of these kernels: it has no {name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("jitney_"), function)
        theirs = (c_int64 * 6)()
        self._library.jitney_sizes(theirs)
        ours = [ctypes.sizeof(one) for one in (Matrix, Layer, Model, Batch, Shape, SamplingRow)]
        if list(theirs) != ours:
            raise NativeUnavailable(f"{path} lays its structures out as {list(theirs)}, not as {ours}")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the kernels have no function {name!r}")


@cache
def kernels(name: str | None = None) -> Kernels:
    """The kernels for this CPU, or for another of `build.LEVELS`. Raises NativeUnavailable."""
    chosen = level() if name is None else name
    return Kernels(built(chosen), chosen)


class Team:
    """Threads that compute together, and the memory they compute in. Of two callers at once, one waits.

    A child of fork() may use it: it gets threads of its own at its first call.
    """

    def __init__(self, library: Kernels, num_threads: int) -> None:
        """num_threads: up to 64. There may come to be fewer, where the system gives no more."""
        self.library = library
        self.threads, self.rooms = library.team(num_threads), library.rooms()
        # Not at exit: a thread that is still computing would find its memory gone.
        weakref.finalize(self, _end, library, self.threads, self.rooms).atexit = False
        if not (self.threads and self.rooms):
            raise MemoryError("no memory for the threads of the kernels")

    @property
    def num_threads(self) -> int:
        """The calling one is one of them."""
        return int(self.library.team_size(self.threads))


def _end(library: Kernels, threads: int | None, rooms: int | None) -> None:
    if threads:
        library.end_team(threads)
    if rooms:
        library.end_rooms(rooms)


def address(tensor: Tensor | None) -> int | None:
    """Where a contiguous tensor's numbers begin; the caller keeps it alive."""
    if tensor is None:
        return None
    assert tensor.is_contiguous(), "kernels take contiguous tensors"
    return tensor.data_ptr()
