"""Weights of the Llama body, read from safetensors and laid out for few, large matrix products.

Pickled checkpoints are refused: unpickling runs whatever the file says.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from jitney.errors import ModelError
from jitney.logs import logger
from jitney_worker.model.config import ModelConfig
from jitney_worker.model.config_files import Entries, read_json

PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Numbers that are what they say. Of smaller ones the scales lie somewhere else, and nobody would apply them."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Matrices are [out, in] as in `torch.nn.functional.linear`.

    qkv: queries, keys and values stacked, [(num_heads + 2 * num_kv_heads) * head_dim, hidden].
    gate_up: both halves of the gated MLP stacked, [2 * intermediate, hidden].
    """

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor
    o_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """The whole model. `head` is `embedding` itself when they are tied."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


class Checkpoint:
    """Tensors of a directory by name, converted to one dtype and device as they are taken."""

    def __init__(self, files: dict[str, Any], where: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._files = files
        self._where = where
        self._dtype = dtype
        self._device = device
        self._taken: set[str] = set()

    def take(self, name: str, *shape: int) -> Tensor:
        """One tensor. Raises ModelError if it is absent, of another shape, or no plain number."""
        if name not in self._files:
            raise ModelError(f"{self._where}: tensor {name} is missing from the weights")
        self._taken.add(name)
        tensor: Tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(f"{self._where}: tensor {name} is {list(tensor.shape)}, config.json implies {list(shape)}")
        if tensor.dtype not in PLAIN:
            raise ModelError(f"{self._where}: tensor {name} is {tensor.dtype}: quantised weights are not served")
        return tensor.to(device=self._device, dtype=self._dtype)

    def left_over(self) -> list[str]:
        """Tensors that nobody took, sorted."""
        return sorted(self._files.keys() - self._taken)

    def stack(self, names: list[str], rows: list[int], *rest: int) -> Tensor:
        """Several tensors below each other; `rows` are their first dimensions."""
        parts = [self.take(name, count, *rest) for name, count in zip(names, rows, strict=True)]
        return torch.cat(parts).contiguous()


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, sorted; where there is a whole file and shards, the whole one, as transformers.

    Raises ModelError if there are none, if some are missing, or if the index names files elsewhere.
    """
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        files = [directory / name for name in _indexed(index)]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ModelError(f"{directory}: weight files are missing: {', '.join(missing)}")
        return files
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return files
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")) or any(directory.glob("*.pth")):
        raise ModelError(f"{directory}: only pickled weights found, and those are never loaded: convert to safetensors")
    raise ModelError(f"{directory}: no safetensors weights found")


def _indexed(index: Path) -> list[str]:
    """Names of the files that an index speaks of, each once, sorted. Raises ModelError if one could lie elsewhere."""
    names = Entries(read_json(index), str(index.parent), index.name).part("weight_map").values()
    odd = [name for name in names if not (isinstance(name, str) and _is_plain(name))]
    if odd:
        raise ModelError(f"{index} names {odd[0]!r}: weight files must lie beside their index")
    if not names:
        raise ModelError(f"{index} names no weight files")
    return sorted(set(names))


def _is_plain(name: str) -> bool:
    return name == Path(name).name and name != ".." and "\0" not in name


def refuse_packed(files: Iterable[Path]) -> None:
    """Raise ModelError for floats of less than 16 bits: only the headers are read. See `PLAIN`."""
    for file in files:
        with _opened(file) as tensors:
            for name in tensors.keys():  # noqa: SIM118  it is no mapping
                if tensors.get_slice(name).get_dtype().startswith(("F8", "F6", "F4")):
                    raise ModelError(f"{file}: tensor {name} is quantised, which is not served")


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        opened = safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is damaged or not a safetensors file: {error}") from error
    with opened as tensors:
        yield tensors


@contextmanager
def open_checkpoint(directory: Path, dtype: torch.dtype, device: torch.device) -> Iterator[Checkpoint]:
    """All weight files of a directory, memory-mapped while the context lasts."""
    with ExitStack() as stack:
        by_name: dict[str, Any] = {}
        for file in weight_files(directory):
            opened = stack.enter_context(_opened(file))
            by_name |= dict.fromkeys(opened.keys(), opened)
        yield Checkpoint(by_name, directory, dtype, device)


def load_weights(directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DecoderWeights:
    """Read a checkpoint. Raises ModelError naming the tensor that is missing or misshapen."""
    vocab = (config.vocab_size, config.hidden_size)
    with open_checkpoint(directory, dtype, device) as checkpoint:
        embedding = checkpoint.take("model.embed_tokens.weight", *vocab)
        weights = DecoderWeights(
            embedding=embedding,
            layers=tuple(_load_layer(checkpoint, config, i) for i in range(config.num_layers)),
            norm=checkpoint.take("model.norm.weight", config.hidden_size),
            head=embedding if config.tied_embeddings else checkpoint.take("lm_head.weight", *vocab),
        )
        unused = [name for name in checkpoint.left_over() if not _is_known_to_be_unused(name, config)]
        if unused:
            logger().warning("weights_unused", model=str(directory), tensors=some_of(unused))
        return weights


def _is_known_to_be_unused(name: str, config: ModelConfig) -> bool:
    """The head of a model that uses its embedding instead, and rotary frequencies, which old files carry along."""
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tied_embeddings)


def some_of(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    ordered = sorted(names)
    return ", ".join(ordered[:5]) + (f" and {len(ordered) - 5} more" if len(ordered) > 5 else "")


def _load_layer(checkpoint: Checkpoint, config: ModelConfig, index: int) -> LayerWeights:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    at = f"model.layers.{index}."
    attention, mlp = at + "self_attn.", at + "mlp."
    qkv = [attention + f"{which}_proj" for which in "qkv"]
    qkv_rows = [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
    gate_up, gate_up_rows = [mlp + "gate_proj", mlp + "up_proj"], [inner, inner]
    if config.fused:
        qkv, qkv_rows = [attention + "qkv_proj"], [sum(qkv_rows)]
        gate_up, gate_up_rows = [mlp + "gate_up_proj"], [2 * inner]

    def stack(names: list[str], rows: list[int], biased: bool) -> tuple[Tensor, Tensor | None]:
        matrix = checkpoint.stack([name + ".weight" for name in names], rows, hidden)
        return matrix, checkpoint.stack([name + ".bias" for name in names], rows) if biased else None

    qkv_matrix, qkv_bias = stack(qkv, qkv_rows, config.qkv_bias)
    gate_up_matrix, gate_up_bias = stack(gate_up, gate_up_rows, config.mlp_bias)
    return LayerWeights(
        input_norm=checkpoint.take(at + "input_layernorm.weight", hidden),
        qkv=qkv_matrix,
        qkv_bias=qkv_bias,
        q_norm=checkpoint.take(attention + "q_norm.weight", dim) if config.qk_norm else None,
        k_norm=checkpoint.take(attention + "k_norm.weight", dim) if config.qk_norm else None,
        o=checkpoint.take(attention + "o_proj.weight", hidden, config.num_heads * dim),
        o_bias=checkpoint.take(attention + "o_proj.bias", hidden) if config.o_bias else None,
        post_norm=checkpoint.take(at + "post_attention_layernorm.weight", hidden),
        gate_up=gate_up_matrix,
        gate_up_bias=gate_up_bias,
        down=checkpoint.take(mlp + "down_proj.weight", hidden, inner),
        down_bias=checkpoint.take(mlp + "down_proj.bias", hidden) if config.mlp_bias else None,
    )
