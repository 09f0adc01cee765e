"""Settings of a worker: frozen, with units in their names, refused by name and value.

Every one can be set as JITNEY_<SECTION>__<NAME>, in the environment or in `.env`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings import SettingsError as UnreadableSource

from jitney.errors import SettingsError
from jitney.keys import check_queue_name, queue_name_for
from jitney.settings import DEFAULT_URL, client_settings, usable_url
from jitney_worker.engine.settings import Policy

RECORD_MAX_BYTES: Final = 256 << 20

_FROZEN = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

ResumeMismatch = Literal["fail", "continue"]
Dtype = Literal["auto", "float32", "bfloat16"]
KernelsName = Literal["auto", "native", "torch"]
Quantization = Literal["none", "int8"]


class EngineSection(BaseModel):
    """The batch and its memory. Names as in vLLM.

    max_num_seqs: seats; absent = 64 on a CPU, 256 on a GPU. num_kv_blocks, kv_cache_bytes: size of the KV
    cache, one or the other; absent = what the device leaves. max_model_len: absent = the model's own.
    bulk_prefill_share: of a step's tokens, what prompts may fill when the last of them are bulk.
    """

    model_config = _FROZEN

    max_num_seqs: int | None = Field(None, ge=1, le=4_096)
    max_num_batched_tokens: int = Field(2_048, ge=1)
    max_model_len: int | None = Field(None, ge=2)
    block_size: int = Field(16, ge=1, le=1_024)
    num_kv_blocks: int | None = Field(None, ge=2)
    kv_cache_bytes: int | None = Field(None, ge=1)
    enable_prefix_caching: bool = True
    long_prefill_token_threshold: int = Field(0, ge=0)
    bulk_prefill_share: float = Field(0.25, gt=0.0, le=1.0)
    policy: Policy = "continuous"

    @model_validator(mode="after")
    def _no_contradiction(self) -> Self:
        if self.num_kv_blocks is not None and self.kv_cache_bytes is not None:
            raise ValueError(
                f"engine.num_kv_blocks={self.num_kv_blocks} and engine.kv_cache_bytes={self.kv_cache_bytes} "
                "both size the KV cache: give one"
            )
        if self.max_num_seqs is not None and self.max_num_seqs > self.max_num_batched_tokens:
            raise ValueError(
                f"engine.max_num_seqs={self.max_num_seqs} must not exceed "
                f"engine.max_num_batched_tokens={self.max_num_batched_tokens}: a full batch would never step"
            )
        return self


class LeaseSection(BaseModel):
    """Ownership. A lease is renewed every third of its life, so that two lost renewals are survivable.

    stall_after_s: with work to do and no token computed for so long, the worker hands all its jobs back; after as
    long again it ends, so that a supervisor starts a fresh one.
    """

    model_config = _FROZEN

    duration_s: float = Field(15.0, ge=0.5, le=3_600.0)
    stall_after_s: float = Field(60.0, gt=0.0)

    @property
    def renew_every_s(self) -> float:
        return self.duration_s / 3

    @property
    def give_up_after_s(self) -> float:
        """A lease not renewed for two thirds of its life: stop generating under it."""
        return self.duration_s * 2 / 3


class WorkerSection(BaseModel):
    """The worker itself.

    id: absent = made up at start. claim_ahead: jobs claimed beyond the free seats, so that one is at hand
    at the very step after a seat frees; one that is not seated within claim_ahead_patience_s goes back when
    another worker could take it. max_unpublished_steps: how far the engine may run ahead of Redis.
    publish_interval_s: how often tokens are written; a job's first and last ones are written at once, and all are once
    three quarters of max_unpublished_steps have gone by. 0 = after every step.
    resume_wait_s: how long a begun answer is kept for a worker of the build (weights, dtype, tokenizer) that began it,
    once none has been seen; then, by resume_mismatch, it fails with its partial text, or any build goes on with it and
    the terminal event says so.
    allow_evicting_server: start also where the server throws accepted jobs away when its memory is full.
    record: a file to which every step is written, for `jitney trace` and `jitney simulate`; absent = none. It grows by
    about 25 bytes for each running sequence and step, and ends at record_max_bytes.
    metrics_port: serve Prometheus metrics there, at metrics_host; absent = not at all, 0 = a free port. Nobody is asked
    for a key: beyond the loopback address, whoever reaches the port reads them.
    """

    model_config = _FROZEN

    id: str | None = Field(None, pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    claim_ahead: int = Field(1, ge=0, le=64)
    claim_ahead_patience_s: float = Field(1.0, gt=0.0)
    max_unpublished_steps: int = Field(8, ge=1)
    publish_interval_s: float = Field(0.15, ge=0.0, le=60.0)
    drain_timeout_s: float = Field(20.0, ge=0.0)
    snapshot_every_s: float = Field(0.5, gt=0.0)
    num_tokenizer_threads: int = Field(2, ge=1, le=32)
    max_attempts: int = Field(3, ge=1)
    max_tries: int = Field(10, ge=1)
    resume_wait_s: float = Field(60.0, ge=0.0)
    resume_mismatch: ResumeMismatch = "fail"
    allow_evicting_server: bool = False
    record: Path | None = None
    record_max_bytes: int = Field(RECORD_MAX_BYTES, ge=1)
    metrics_port: int | None = Field(None, ge=0, le=65_535)
    metrics_host: str = "127.0.0.1"

    @property
    def max_steps_held(self) -> int:
        """Steps whose tokens may wait to be written together: some of those allowed are for the way to Redis."""
        return max(1, self.max_unpublished_steps * 3 // 4)


class WorkerSettings(BaseSettings):
    """Everything `jitney worker` can be told.

    num_threads: of the model; absent = the cores. kernels: `native` (compiled for this CPU), `torch`, or `auto`: native
    where that can be. quantization: of the weights, when they are loaded. batch_invariant: refuse to start where an
    answer could depend on its neighbours or on where it was resumed; jobs begun so are continued only by the like.
    """

    model_config = SettingsConfigDict(
        frozen=True, env_prefix="JITNEY_", env_nested_delimiter="__", env_file=".env", extra="ignore"
    )

    redis_url: str = Field(DEFAULT_URL, repr=False)
    model: str = "smollm2-135m-instruct"
    queue: str | None = None
    dtype: Dtype = "auto"
    device: str = "auto"
    num_threads: int | None = Field(None, ge=1)
    kernels: KernelsName = "auto"
    quantization: Quantization = "none"
    batch_invariant: bool = False
    offline: bool = False
    engine: EngineSection = EngineSection()
    lease: LeaseSection = LeaseSection()
    worker: WorkerSection = WorkerSection()

    @model_validator(mode="after")
    def _kernels_are_wanted(self) -> Self:
        for name, wanted in (("quantization", self.quantization != "none"), ("batch_invariant", self.batch_invariant)):
            if wanted and self.kernels == "torch":
                raise ValueError(f"{name}={getattr(self, name)!r} needs the compiled kernels, but kernels='torch'")
        return self

    @property
    def model_name(self) -> str:
        """What users call the model: a directory's last part, otherwise the name as given."""
        path = Path(self.model)
        return path.resolve().name if path.is_dir() else self.model

    @property
    def queue_name(self) -> str:
        """The queue as given, or the one that the model's name makes. Raises InvalidJob for a bad name."""
        return check_queue_name(self.queue) if self.queue else queue_name_for(self.model_name)


def load_settings(**overrides: Any) -> WorkerSettings:
    """Settings from the environment, with flags on top. Raises SettingsError that names field and value.

    `overrides` may be nested dicts; what is None was not given.
    """
    try:
        base = WorkerSettings().model_dump()
        base["redis_url"] = client_settings().url
        merged = _merge(base, overrides)
        usable_url(merged["redis_url"])
        return WorkerSettings.model_validate(merged)
    except ValidationError as error:
        raise SettingsError(_complaint(error)) from None
    except UnreadableSource as error:  # a whole section that is not JSON, for one
        raise SettingsError(f"JITNEY_ settings: {error}") from None


def _complaint(error: ValidationError) -> str:
    """The first complaint: field, reason and value; what contradicts something else names the values itself."""
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    given, message = first["input"], str(first["msg"]).removeprefix("Value error, ")
    if isinstance(given, str | int | float) and where != "redis_url":  # a password may stand in an address
        return f"{where}={given!r}: {message}"
    return f"{where}: {message}" if where else message


def _merge(base: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for name, value in overrides.items():
        if isinstance(value, dict):
            merged[name] = _merge(base[name], value)
        elif value is not None:
            merged[name] = value
    return merged
