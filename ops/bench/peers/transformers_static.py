"""transformers' `generate` with static batches in order of arrival: each lasts as long as its longest job.

Settings: batch (16). Prompts of different lengths are padded on the left.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ops.bench.peers.load import Load, Outcome, PeerJob, measure, read_load


class Peer:
    def __init__(self, load: Load) -> None:
        self._torch: Any = import_module("torch")
        transformers: Any = import_module("transformers")
        transformers.utils.logging.disable_progress_bar()
        self.version = str(transformers.__version__)
        self._batch = load.settings.get("batch", 16)
        self._torch.set_num_threads(load.num_threads)
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            str(load.model), dtype=self._torch.bfloat16, local_files_only=True
        ).eval()
        self._model.generation_config.eos_token_id = None
        self._model.generation_config.pad_token_id = 0

    def generate(self, jobs: Sequence[PeerJob]) -> Outcome:
        start = time.monotonic()
        token_ids: list[tuple[int, ...]] = []
        ended: list[float] = []
        for first in range(0, len(jobs), self._batch):
            batch = jobs[first : first + self._batch]
            token_ids += self._one_batch(batch)
            ended += [time.monotonic() - start] * len(batch)
        return Outcome(tuple(token_ids), tuple(ended))

    def _one_batch(self, batch: Sequence[PeerJob]) -> list[tuple[int, ...]]:
        width = max(len(job.prompt) for job in batch)
        ids = [[0] * (width - len(job.prompt)) + list(job.prompt) for job in batch]
        mask = [[0] * (width - len(job.prompt)) + [1] * len(job.prompt) for job in batch]
        options: dict[str, Any] = {"do_sample": False}
        if batch[0].temperature > 0:  # one seed for the whole batch: it has no others
            self._torch.manual_seed(batch[0].seed or 0)
            options = {"do_sample": True, "temperature": batch[0].temperature, "top_p": batch[0].top_p, "top_k": 0}
        with self._torch.inference_mode():
            output = self._model.generate(
                input_ids=self._torch.tensor(ids),
                attention_mask=self._torch.tensor(mask),
                max_new_tokens=max(job.max_tokens for job in batch),
                **options,
            )
        return [tuple(row[width : width + job.max_tokens]) for row, job in zip(output.tolist(), batch, strict=True)]


def main() -> None:
    load = read_load()
    start = time.monotonic()
    peer = Peer(load)
    load_s = time.monotonic() - start
    measure(load, peer.generate, engine="static", version=peer.version, dtype="bfloat16", load_s=load_s)


if __name__ == "__main__":
    main()
