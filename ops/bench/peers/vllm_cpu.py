"""vLLM's CPU build, offline. Settings: max_num_batched_tokens (its own default without it)."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ops.bench.peers.load import Load, Outcome, PeerJob, measure, read_load

KV_GIB = 2


def engine_options(load: Load) -> dict[str, Any]:
    """Arguments of `LLM`. Seeds of single requests do not go with chunked prompts on its CPU backend."""
    max_model_len = max(2_048, -(-load.longest // 256) * 256)
    options: dict[str, Any] = {
        "model": str(load.model),
        "dtype": "bfloat16",
        "max_model_len": max_model_len,
        "max_num_seqs": load.seats,
        "enable_prefix_caching": load.prefix_caching,
        "disable_log_stats": False,
        "seed": 0,
    }
    if "max_num_batched_tokens" in load.settings:
        options["max_num_batched_tokens"] = load.settings["max_num_batched_tokens"]
    if any(job.temperature > 0 for job in load.jobs):
        options |= {"enable_chunked_prefill": False}
        options["max_num_batched_tokens"] = max(max_model_len, options.get("max_num_batched_tokens", 4_096))
    return options


class Peer:
    def __init__(self, load: Load) -> None:
        self._vllm: Any = import_module("vllm")
        self.version = str(self._vllm.__version__)
        self._llm = self._vllm.LLM(**engine_options(load))

    def generate(self, jobs: Sequence[PeerJob]) -> Outcome:
        prompts = [{"prompt_token_ids": list(job.prompt)} for job in jobs]
        start = time.time()
        answers = self._llm.generate(prompts, [self._params(job) for job in jobs], use_tqdm=False)
        wall_s = time.time() - start
        ended = [getattr(answer.metrics, "last_token_ts", 0.0) for answer in answers]
        latest = max(ended)  # on a clock of its own: the last one ended with the call
        return Outcome(
            tuple(tuple(answer.outputs[0].token_ids) for answer in answers),
            tuple(wall_s - (latest - each) for each in ended) if all(ended) else (),
        )

    def forget_prefixes(self) -> None:
        assert self._llm.reset_prefix_cache()

    def _params(self, job: PeerJob) -> Any:
        return self._vllm.SamplingParams(
            max_tokens=job.max_tokens,
            ignore_eos=True,
            detokenize=False,
            temperature=job.temperature,
            top_p=job.top_p,
            seed=job.seed,
        )


def main() -> None:
    load = read_load()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(KV_GIB))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{load.num_threads - 1}")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    start = time.monotonic()
    peer = Peer(load)
    load_s = time.monotonic() - start
    if load.prefix_caching:
        peer.generate(load.warm)
        peer.forget_prefixes()
    measure(load, peer.generate, engine="vllm", version=peer.version, dtype="bfloat16", load_s=load_s)


if __name__ == "__main__":
    main()
