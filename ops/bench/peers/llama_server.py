"""llama.cpp's own server, over HTTP. Settings: slots (as many as the workload has seats).

The program is named by LLAMA_SERVER; it is started for the run, on a free port of the loopback interface.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ops.bench.peers.load import Load, Outcome, PeerJob, measure, read_load

READY_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 900.0


class Peer:
    """A server, and one connection for each job in flight."""

    def __init__(self, load: Load) -> None:
        self._slots = load.settings.get("slots", load.seats)
        self._caches = load.prefix_caching
        self._port = free_port()
        self._server = subprocess.Popen(command(load, self._slots, self._port), stdout=subprocess.DEVNULL)

    def __enter__(self) -> Peer:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < deadline and self._server.poll() is None:
            try:
                if self._ask("GET", "/health")[0] == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.05)
        self.__exit__()
        raise RuntimeError("the server did not get ready")

    def __exit__(self, *_: object) -> None:
        self._server.terminate()
        self._server.wait(30)

    @property
    def version(self) -> str:
        return str(self._ask("GET", "/props")[1].get("build_info", "unknown"))

    def generate(self, jobs: Sequence[PeerJob]) -> Outcome:
        start = time.monotonic()

        def ride(job: PeerJob) -> tuple[tuple[int, ...], float]:
            return self._complete(job), time.monotonic() - start

        with ThreadPoolExecutor(len(jobs)) as pool:
            rides = list(pool.map(ride, jobs))
        return Outcome(tuple(ids for ids, _ in rides), tuple(ended for _, ended in rides))

    def _complete(self, job: PeerJob) -> tuple[int, ...]:
        body = {
            "prompt": job.prompt,
            "n_predict": job.max_tokens,
            "ignore_eos": True,
            "temperature": job.temperature,
            "top_p": job.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "seed": job.seed or 0,
            "cache_prompt": self._caches,
            "return_tokens": True,
        }
        status, answer = self._ask("POST", "/completion", body)
        assert status == 200, f"HTTP {status}: {answer}"
        return tuple(answer["tokens"])

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_TIMEOUT_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read() or b"{}")
        finally:
            connection.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command(load: Load, slots: int, port: int) -> list[str]:
    """A cache in which every slot can hold the longest job."""
    words: dict[str, object] = {
        "--model": load.model,
        "--host": "127.0.0.1",
        "--port": port,
        "--threads": load.num_threads,
        "--threads-batch": load.num_threads,
        "--parallel": slots,
        "--ctx-size": slots * (-(-load.longest // 256) * 256),
        "--cache-type-k": "bf16",
        "--cache-type-v": "bf16",
    }
    flags = [str(word) for flag, value in words.items() for word in (flag, value)]
    return [os.environ["LLAMA_SERVER"], *flags, "--no-webui"]


def main() -> None:
    load = read_load()
    start = time.monotonic()
    with Peer(load) as peer:
        load_s = time.monotonic() - start
        measure(load, peer.generate, engine="llamacpp", version=peer.version, dtype="bfloat16", load_s=load_s)


if __name__ == "__main__":
    main()
