"""The model runner: executes the engine's steps on torch."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from jitney.errors import SettingsError
from jitney_worker.engine.protocol import ModelOutput, SchedulerOutput, TokenLogprobs
from jitney_worker.engine.sequence import SequenceId
from jitney_worker.model.attention import AttentionBackend, TorchAttention
from jitney_worker.model.batch import step_batch
from jitney_worker.model.cache import KVCache, default_budget, num_blocks_for
from jitney_worker.model.choice import served_config
from jitney_worker.model.config import ModelConfig
from jitney_worker.model.decoder import Decoder, ServedConfig
from jitney_worker.model.llama import LlamaDecoder
from jitney_worker.model.logprobs import given_logprobs
from jitney_worker.model.rows import SamplingRows
from jitney_worker.model.sampler import sample
from jitney_worker.model.weights import load_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchRunner:
    """Fulfils `ModelRunner`. One thread at a time may call `execute`."""

    def __init__(self, decoder: Decoder, cache: KVCache, attention: AttentionBackend) -> None:
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
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def max_model_len(self) -> int:
        return self.config.max_model_len

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.config.eos_token_ids

    @torch.inference_mode()
    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        """Write K and V of every scheduled token; sample one token where a sequence is complete."""
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
        rows = sample(self.decoder.logits(hidden[batch.sample_at]), sampling) if sampling else []
        return ModelOutput(rows, self._prompt_logprobs(scheduled, hidden, batch.first_at))

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
) -> TorchRunner:
    """Read a model directory and allocate its cache.

    num_blocks wins over kv_cache_bytes; without either `default_budget` decides. num_threads: of torch, for the whole
    process. Raises ModelError (files) or SettingsError (numbers).
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    path = Path(directory)
    on = pick_device(device)
    kind = pick_dtype(dtype, on)
    decoder = load_decoder(path, kind, on)
    if num_blocks is None:
        budget = default_budget(on) if kv_cache_bytes is None else kv_cache_bytes
        num_blocks = num_blocks_for(budget, decoder.attention_layers, block_size, kind)
    cache = KVCache(decoder.attention_layers, num_blocks, block_size, kind, on)
    return TorchRunner(decoder, cache, TorchAttention(cache))


def load_decoder(directory: Path, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The native decoder where it knows the architecture, otherwise transformers' own model. Raises ModelError."""
    config = served_config(directory)
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
