"""How a workload is to be run: the mode, and what shapes the engine. Contradictions are refused by name and value."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from jitney.errors import SettingsError
from jitney_worker.bench.workloads import Workload
from jitney_worker.engine.settings import Policy
from jitney_worker.settings import WorkerSettings, load_settings

MODES = ("path", "engine", "static", "serial", "naive")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What stands on the command line. None = as the workload, the mode or the worker's own default says.

    seats, policy, max_num_batched_tokens, num_kv_blocks, kv_cache_bytes, num_threads, dtype,
    kernels, quantization: of a worker of our own.
    is_profiled: report what a step is made of.
    """

    mode: str = "path"
    model: str | None = None
    redis_url: str | None = None
    queue: str | None = None
    dtype: str | None = None
    seats: int | None = None
    policy: str | None = None
    max_num_batched_tokens: int | None = None
    num_kv_blocks: int | None = None
    kv_cache_bytes: int | None = None
    num_threads: int | None = None
    kernels: str | None = None
    quantization: str | None = None
    is_profiled: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise SettingsError(f"--mode {self.mode!r} is not one of {', '.join(MODES)}")
        if self.policy is not None and self.policy not in get_args(Policy):
            raise SettingsError(f"--policy {self.policy!r} is not one of {', '.join(get_args(Policy))}")
        if self.is_profiled and self.mode != "engine":
            raise SettingsError(f"--profile looks into an engine in this process: use --mode engine, not {self.mode}")
        self._check_running_stack()
        self._check_mode()

    def _check_running_stack(self) -> None:
        if self.redis_url is None:
            if self.queue is not None:
                raise SettingsError(f"--queue {self.queue} is of a running stack: say where it is (--redis-url)")
            return
        if self.mode != "path":
            raise SettingsError(f"--mode {self.mode} starts an engine of its own: leave --redis-url out")
        for flag, value in self._shape.items():
            if value is not None:
                raise SettingsError(f"{flag} {value} shapes a worker of our own: leave --redis-url out")

    def _check_mode(self) -> None:
        for flag, value, only in self._fixed:
            if value is not None and value != only:
                raise SettingsError(f"{flag} {value} contradicts --mode {self.mode}, which means {flag} {only}")
        if self.mode == "naive":
            for flag, value in self._shape.items():
                if value is not None and flag not in ("--num-threads", "--dtype"):
                    raise SettingsError(f"{flag} {value} means nothing to --mode naive, which has no engine")

    @property
    def _fixed(self) -> tuple[tuple[str, object, object], ...]:
        """What the mode itself decides: flag, what was asked for, what it is."""
        if self.mode == "static":
            return (("--policy", self.policy, "static"),)
        if self.mode == "serial":
            return (("--seats", self.seats, 1), ("--policy", self.policy, "continuous"))
        return ()

    @property
    def _shape(self) -> dict[str, object]:
        return {
            "--seats": self.seats,
            "--policy": self.policy,
            "--max-num-batched-tokens": self.max_num_batched_tokens,
            "--num-kv-blocks": self.num_kv_blocks,
            "--kv-cache-bytes": self.kv_cache_bytes,
            "--num-threads": self.num_threads,
            "--dtype": self.dtype,
            "--kernels": self.kernels,
            "--quantization": self.quantization,
        }

    def seats_for(self, workload: Workload) -> int:
        """Seats of the engine."""
        return 1 if self.mode == "serial" else self.seats or workload.seats

    def worker_settings(self, workload: Workload, directory: Path) -> WorkerSettings:
        """Settings of a worker that runs the workload from a model's directory. Raises SettingsError."""
        return load_settings(
            model=str(directory),
            queue=load_settings(model=self.model or workload.model).queue_name,
            dtype=self.dtype,
            num_threads=self.num_threads,
            kernels=self.kernels,
            quantization=self.quantization,
            engine=self._engine(workload),
        )

    def _engine(self, workload: Workload) -> dict[str, Any]:
        return {
            "max_num_seqs": self.seats_for(workload),
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "num_kv_blocks": self.num_kv_blocks,
            "kv_cache_bytes": self.kv_cache_bytes,
            "policy": "static" if self.mode == "static" else self.policy or "continuous",
            "enable_prefix_caching": workload.prefix_caching,
        }
