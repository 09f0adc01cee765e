"""The model runner: executes the engine's steps on torch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from jitney.errors import SettingsError
from jitney.logs import logger
from jitney_worker.engine.protocol import ModelOutput, SchedulerOutput, TokenLogprobs
from jitney_worker.engine.sequence import SequenceId
from jitney_worker.model.attention import AttentionBackend, TorchAttention
from jitney_worker.model.batch import step_batch
from jitney_worker.model.cache import KVCache, PagedCache, default_budget, num_blocks_for, populate
from jitney_worker.model.choice import served_config
from jitney_worker.model.choosing import choose
from jitney_worker.model.config import ModelConfig
from jitney_worker.model.decoder import Decoder, ServedConfig
from jitney_worker.model.llama import LlamaDecoder
from jitney_worker.model.logprobs import given_logprobs
from jitney_worker.model.native.attention import NativeAttention, can_attend
from jitney_worker.model.native.cache import TiledCache, tiled
from jitney_worker.model.native.choice import KernelsName, team_for
from jitney_worker.model.native.decoder import NativeDecoder
from jitney_worker.model.native.library import Team
from jitney_worker.model.pooling import pooled_states
from jitney_worker.model.rows import SamplingRows
from jitney_worker.model.weights import load_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchRunner:
    """Fulfils `ModelRunner`. One thread at a time may call `execute`."""

    def __init__(self, decoder: Decoder, cache: PagedCache, attention: AttentionBackend) -> None:
        self.decoder = decoder
        self.cache = cache
        self.attention = attention
        self._sampling_rows = SamplingRows(decoder.config.vocab_size)

    @property
    def config(self) -> ServedConfig:
        return self.decoder.config

    @property
    def num_blocks(self) -> int:
        """Blocks the engine may hand out: ids 0 to num_blocks - 1."""
        return self.cache.num_blocks

    @property
    def block_size(self) -> int:
        return self.cache.block_size

    @property
    def dtype(self) -> str:
        """`float32`, `bfloat16` or `float16`."""
        return str(self.cache.dtype).removeprefix("torch.")

    @property
    def device(self) -> str:
        return str(self.cache.device)

    @property
    def team(self) -> Team | None:
        """Whose kernels attend; None for plain torch."""
        return self.attention.team if isinstance(self.attention, NativeAttention) else None

    @property
    def kernels(self) -> str:
        """What multiplies: `torch`, or the level of the CPU's instructions that the kernels were compiled for."""
        return "torch" if self.team is None else self.team.library.level

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row's results are bit-equal whatever is computed beside it, and however its prompt is cut."""
        return isinstance(self.decoder, NativeDecoder)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.config.max_model_len

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.config.eos_token_ids

    @torch.inference_mode()
    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        """Write K and V of every scheduled token; sample one token where a sequence is complete, or pool it."""
        self.cache.copy(scheduled.copies)
        batch = step_batch(
            scheduled.scheduled,
            block_size=self.cache.block_size,
            scratch_block=self.cache.scratch_block,
            device=self.cache.device,
        )
        if batch.fresh_blocks.numel():
            self.cache.wipe(batch.fresh_blocks)
        hidden = self.decoder.forward(batch.token_ids, batch.positions, self.attention.plan(batch))
        sampling = self._sampling_rows.of(scheduled.scheduled)
        rows = choose(self.decoder, hidden[batch.sample_at], sampling)
        pooled = pooled_states(self.decoder, hidden, scheduled.scheduled, batch.first_at)
        return ModelOutput(rows, self._prompt_logprobs(scheduled, hidden, batch.first_at), pooled)

    def _prompt_logprobs(
        self, scheduled: SchedulerOutput, hidden: Tensor, first_at: tuple[int, ...]
    ) -> dict[SequenceId, list[TokenLogprobs]]:
        """Of the prompt's tokens that follow the ones computed in this step, for the sequences that want them."""
        found: dict[SequenceId, list[TokenLogprobs]] = {}
        for one, first in zip(scheduled.scheduled, first_at, strict=True):
            if one.num_prompt_logprobs is not None:
                prompt_ids = one.sequence.request.prompt_ids
                following = prompt_ids[one.start + 1 : one.stop + 1]
                found[one.sequence.id] = given_logprobs(
                    self.decoder.logits, hidden[first : first + len(following)], following, one.num_prompt_logprobs
                )
        return found


def load_runner(
    directory: Path | str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    num_blocks: int | None = None,
    kv_cache_bytes: int | None = None,
    block_size: int = 16,
    num_threads: int | None = None,
    kernels: KernelsName = "auto",
    quantization: str = "none",
    batch_invariant: bool = False,
) -> TorchRunner:
    """Read a model directory and allocate its cache.

    num_blocks wins over kv_cache_bytes; without either `default_budget` decides. num_threads: of the kernels, or else
    of torch, for the whole process. quantization: `none` or `int8`. batch_invariant: refuse what could not be it.
    Raises ModelError (files) or SettingsError (numbers, or what the kernels cannot do).
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    path, on = Path(directory), pick_device(device)
    kind = pick_dtype(dtype, on)
    team = team_for(kernels, device=on, dtype=kind, block_size=block_size, num_threads=num_threads)
    decoder = load_decoder(path, kind, on, team=team, quantization=quantization)
    if isinstance(decoder, NativeDecoder):
        # The threads of torch spin for milliseconds after each of its small operations, on cores that the team needs.
        torch.set_num_threads(1)
    if batch_invariant and not isinstance(decoder, NativeDecoder):
        raise SettingsError(f"batch_invariant=True needs the kernels and a native architecture; {path} has not both")
    if team is not None and not all(map(can_attend, decoder.attention_layers)):
        logger().warning("kernels_torch", reason="the heads of this model are too wide for the kernels")
        team = None
    layers = decoder.attention_layers if team is None else tuple(map(tiled, decoder.attention_layers))
    if num_blocks is None:
        budget = default_budget(on) if kv_cache_bytes is None else kv_cache_bytes
        num_blocks = num_blocks_for(budget, layers, block_size, kind)
    return runner_over(decoder, num_blocks, block_size, kind, on, team)


def runner_over(
    decoder: Decoder, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device, team: Team | None
) -> TorchRunner:
    """A runner with an empty cache of its own. team: whose kernels attend; None for plain torch."""
    layers = decoder.attention_layers
    if team is None:
        plain = KVCache(layers, num_blocks, block_size, dtype, device)
        populate(plain.pools.values())
        return TorchRunner(decoder, plain, TorchAttention(plain))
    cache = TiledCache(layers, num_blocks, block_size, dtype)
    populate(cache.pools.values())
    return TorchRunner(decoder, cache, NativeAttention(cache, team))


def load_decoder(
    directory: Path, dtype: torch.dtype, device: torch.device, *, team: Team | None = None, quantization: str = "none"
) -> Decoder:
    """The native decoder where it knows the architecture, otherwise transformers' own model. Raises ModelError.

    team: the native decoder computes with its kernels. quantization: only they can; SettingsError without.
    """
    config = served_config(directory)
    if quantization not in ("none", "int8"):
        raise SettingsError(f"quantization={quantization!r} is unknown: use none or int8")
    if isinstance(config, ModelConfig) and team is not None and all(map(can_attend, config.attention_layers)):
        weights = load_weights(directory, config, dtype, device)
        return NativeDecoder(config, weights, team, quantised=quantization == "int8")
    if quantization != "none":
        raise SettingsError(f"quantization={quantization!r} needs the kernels and a native architecture")
    if isinstance(config, ModelConfig):
        return LlamaDecoder(config, load_weights(directory, config, dtype, device))
    from jitney_worker.model.adopted import load_adopted

    return load_adopted(directory, config, dtype, device)


def pick_device(name: str) -> torch.device:
    """`auto` is the GPU if torch sees one. Raises SettingsError for a device that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise SettingsError(f"device={name!r} is unknown: use auto, cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise SettingsError(f"device={name!r} was asked for, but torch sees no GPU here")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 where the hardware multiplies it, otherwise float32."""
    if name == "auto":
        return torch.bfloat16 if _multiplies_bfloat16(device) else torch.float32
    if name not in DTYPES:
        raise SettingsError(f"dtype={name!r} is unknown: use auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def _multiplies_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
