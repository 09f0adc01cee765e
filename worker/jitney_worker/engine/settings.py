"""What the engine may use: seats, tokens a step, blocks. Frozen; a contradiction is refused by name and value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from jitney.errors import SettingsError

Policy = Literal["continuous", "static"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """Limits of one engine, named as in vLLM.

    max_model_len: positions the model has; prompt and output together never exceed it.
    num_blocks, block_size: the KV cache is `num_blocks` blocks of `block_size` tokens each.
    max_num_seqs: seats, that is, sequences computed in one step at most.
    max_num_batched_tokens: tokens computed in one step at most.
    long_prefill_token_threshold: tokens of one sequence computed in one step at most; 0 = no such limit.
    bulk_prefill_share: share of a step's tokens that prompts may fill when the last of them are bulk. So a step that
        somebody waits for is no longer for the backlog behind it than other steps are; prompts of others may fill it.
    admission_reserve: share of all blocks that newcomers leave to running sequences, in so far as those can
        still grow; a lone sequence always gets in.
    policy: `continuous` fills a seat as soon as it is free; `static` only when all are.
    check: verify the engine's laws after every step (tests; it costs more than the step itself).
    """

    max_model_len: int
    num_blocks: int
    block_size: int = 16
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    admission_reserve: float = 0.15
    bulk_prefill_share: float = 0.25
    policy: Policy = "continuous"
    check: bool = False

    def __post_init__(self) -> None:
        self._at_least("max_model_len", 2)
        self._at_least("num_blocks", 1)
        self._at_least("block_size", 1)
        self._at_least("max_num_seqs", 1)
        self._at_least("max_num_batched_tokens", 1)
        self._at_least("long_prefill_token_threshold", 0)
        if not 0.0 <= self.admission_reserve < 1.0:
            raise SettingsError(f"admission_reserve={self.admission_reserve} must be at least 0 and below 1")
        if not 0.0 < self.bulk_prefill_share <= 1.0:
            raise SettingsError(f"bulk_prefill_share={self.bulk_prefill_share} must be above 0 and at most 1")
        if self.policy not in get_args(Policy):
            raise SettingsError(f"policy={self.policy!r} must be one of {', '.join(get_args(Policy))}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SettingsError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}, so that every running sequence gains a token in every step"
            )

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SettingsError(f"{name}={value!r} must be a whole number of at least {least}")

    @property
    def max_bulk_prefill(self) -> int:
        """Tokens of prompts in one step, as far as prompts of bulk may fill it."""
        return max(1, int(self.bulk_prefill_share * self.max_num_batched_tokens))

    @property
    def num_slots(self) -> int:
        """Tokens whose K and V fit into the cache."""
        return self.num_blocks * self.block_size

    @property
    def max_sequence_tokens(self) -> int:
        """Prompt and output of one sequence at most: the model's positions, or the cache's slots and one more.

        The last token is sampled and never computed, so it needs no slot.
        """
        return min(self.max_model_len, self.num_slots + 1)

    def features(self) -> dict[str, Any]:
        """The facts a worker shows of its engine."""
        return {
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_model_len": self.max_model_len,
            "max_sequence_tokens": self.max_sequence_tokens,
            "block_size": self.block_size,
            "num_blocks": self.num_blocks,
            "enable_prefix_caching": self.enable_prefix_caching,
            "long_prefill_token_threshold": self.long_prefill_token_threshold,
            "bulk_prefill_share": self.bulk_prefill_share,
            "policy": self.policy,
        }
