"""OpenVINO GenAI's continuous batching. Settings: max_num_batched_tokens (1,024)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

from ops.bench.peers.load import Load, Outcome, PeerJob, measure, read_load

KV_GB = 2


class Peer:
    """Driven step by step, so that each job's end is known."""

    def __init__(self, load: Load) -> None:
        self._genai: Any = import_module("openvino_genai")
        self._numpy: Any = import_module("numpy")
        self._tensor: Any = import_module("openvino").Tensor
        self._num_requests = 0
        scheduler = self._genai.SchedulerConfig()
        scheduler.max_num_seqs = load.seats
        scheduler.max_num_batched_tokens = load.settings.get("max_num_batched_tokens", 1_024)
        scheduler.enable_prefix_caching = load.prefix_caching
        scheduler.dynamic_split_fuse = True
        scheduler.cache_size = KV_GB
        properties = {
            "INFERENCE_NUM_THREADS": load.num_threads,
            "INFERENCE_PRECISION_HINT": "bf16",
            "KV_CACHE_PRECISION": "bf16",
            "ENABLE_CPU_PINNING": False,
        }
        self._pipeline = self._genai.ContinuousBatchingPipeline(str(load.model), scheduler, "CPU", properties)

    def generate(self, jobs: Sequence[PeerJob]) -> Outcome:
        start = time.monotonic()
        requests = [self._add(job) for job in jobs]
        ended = [0.0] * len(jobs)
        left = set(range(len(jobs)))
        finished = self._genai.GenerationStatus.FINISHED
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.monotonic() - start
            for number in [number for number in left if requests[number].get_status() == finished]:
                ended[number] = now
                left.remove(number)
        assert not left, f"{len(left)} jobs were given up"
        return Outcome(tuple(tuple(request.read_all()[0].generated_ids) for request in requests), tuple(ended))

    def _add(self, job: PeerJob) -> Any:
        self._num_requests += 1
        prompt = self._tensor(self._numpy.array([job.prompt], dtype=self._numpy.int64))
        return self._pipeline.add_request(self._num_requests, prompt, self._options(job))

    def _options(self, job: PeerJob) -> Any:
        options = self._genai.GenerationConfig()
        options.max_new_tokens = job.max_tokens
        options.ignore_eos = True
        options.do_sample = job.temperature > 0
        if options.do_sample:
            options.temperature, options.top_p, options.rng_seed = job.temperature, job.top_p, job.seed or 0
        return options


def main() -> None:
    load = read_load()
    start = time.monotonic()
    peer = Peer(load)
    load_s = time.monotonic() - start
    measure(load, peer.generate, engine="openvino", version=version("openvino-genai"), dtype="bfloat16", load_s=load_s)


if __name__ == "__main__":
    main()
