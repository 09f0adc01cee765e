"""`python -m tests.faults.hash_worker`: the real worker, in a process of its own, over a model that is a hash.

Runtime, engine, text and Redis are the product's; only the model is a double, behind the engine's own protocol.
Every step takes `--step-s`, as a model's would. What it computed is appended to `--tally`, a line a step.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

from tests.faults.hash_model import CRASH, HANG, MAX_MODEL_LEN, SeededHashModel
from tests.faults.points import Point, Points, say
from tests.faults.unprotected import WITHOUT, mutate_scripts
from tests.faults.witness import Witness

from jitney.cards import write_card
from jitney.connection import connect
from jitney.logs import configure
from jitney.messages import Event
from jitney_worker.crew import crew_of
from jitney_worker.engine.protocol import ModelOutput, SchedulerOutput
from jitney_worker.engine.settings import EngineSettings
from jitney_worker.runtime.worker import Crew, Worker
from jitney_worker.settings import WorkerSettings, load_settings
from jitney_worker.text.tokenizer import Tokenizer


@dataclass
class TimedRunner:
    """A runner in front of the model: takes its time, keeps the tally, passes the points, falls to poison."""

    model: SeededHashModel
    points: Points
    step_s: float
    tally: int
    witness: Witness

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        self.witness.of_step(scheduled)
        self.points.of_step(scheduled)
        self._fall_to_poison(scheduled)
        select.select([], [], [], self.step_s)  # what a forward pass takes; libfaketime breaks time.sleep
        output = self.model.execute(scheduled)
        computed = sum(item.stop - item.start for item in scheduled.scheduled)
        os.write(self.tally, b"%d %d %d\n" % (len(output.rows), computed, len(scheduled.preempted)))
        return output

    def _fall_to_poison(self, scheduled: SchedulerOutput) -> None:
        for item in scheduled.scheduled:
            prompt_ids = item.sequence.request.prompt_ids
            if CRASH in prompt_ids:
                say("poisoned crash")
                os.kill(os.getpid(), signal.SIGKILL)
            if HANG in prompt_ids:
                say("poisoned hang")
                threading.Event().wait()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="hash_worker")
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--queue", required=True)
    parser.add_argument("--id", required=True)
    parser.add_argument("--tokenizer", required=True, type=Path)
    parser.add_argument("--tally", required=True, type=Path)
    parser.add_argument("--lease-s", type=float, default=1.5)
    parser.add_argument("--stall-after-s", type=float, default=60.0)
    parser.add_argument("--drain-timeout-s", type=float, default=20.0)
    parser.add_argument("--step-s", type=float, default=0.02)
    parser.add_argument("--seats", type=int, default=28)  # three workers have few to spare for 70 jobs: each gets some
    parser.add_argument("--num-blocks", type=int, default=1024)
    parser.add_argument("--max-num-batched-tokens", type=int, default=64)
    parser.add_argument("--fingerprint", default="hash.1")
    parser.add_argument("--resume-wait-s", type=float, default=60.0)
    parser.add_argument("--resume-mismatch", default="fail")
    parser.add_argument("--salt", type=int, default=0, help="another value is another model")
    parser.add_argument("--at", action="append", default=[], type=Point.parse, help="place:number:action")
    parser.add_argument("--newer", action="store_true", help="write a field into every event that nobody here knows")
    parser.add_argument("--publish-interval-s", type=float, default=0.0)  # a write for each step: the most to be cut
    parser.add_argument("--padding", type=int, default=0, help="bytes that every event carries besides")
    parser.add_argument("--mutate", action="append", default=[], help="script=old=>new")
    parser.add_argument("--without", action="append", default=[], choices=WITHOUT, help="a protection to do without")
    return parser.parse_args()


def settings_of(asked: argparse.Namespace) -> WorkerSettings:
    return load_settings(
        redis_url=asked.redis_url,
        queue=asked.queue,
        lease={"duration_s": asked.lease_s, "stall_after_s": asked.stall_after_s},
        worker={
            "id": asked.id,
            "drain_timeout_s": asked.drain_timeout_s,
            "snapshot_every_s": 0.1,
            "publish_interval_s": asked.publish_interval_s,
            "resume_wait_s": asked.resume_wait_s,
            "resume_mismatch": asked.resume_mismatch,
        },
    )


def make_crew(asked: argparse.Namespace, settings: WorkerSettings) -> Crew:
    tally = os.open(asked.tally, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    runner = TimedRunner(SeededHashModel(salt=asked.salt), Points(asked.at), asked.step_s, tally, Witness())
    runner.points.around_scripts()
    runner.witness.watch()
    engine_settings = EngineSettings(
        max_model_len=MAX_MODEL_LEN,
        num_blocks=asked.num_blocks,
        max_num_seqs=asked.seats,
        max_num_batched_tokens=max(asked.seats, asked.max_num_batched_tokens),
        long_prefill_token_threshold=16,  # most prompts take several steps
    )
    return crew_of(
        runner,
        engine_settings,
        Tokenizer.load(asked.tokenizer),
        model="hash",
        queue=settings.queue_name,
        fingerprint=asked.fingerprint,
        worker_id=asked.id,
    )


def write_with(field: bytes) -> None:
    """As a later version would: the same events, and one field more."""
    encode = Event.encode

    def encode_newer(self: Event) -> bytes:
        return encode(self)[:-1] + b"," + field + b"}"

    Event.encode = encode_newer  # type: ignore[method-assign]


async def serve(asked: argparse.Namespace) -> int:
    settings = settings_of(asked)
    if asked.newer:
        write_with(b'"x_later":{"a":[1]}')
    if asked.padding:
        write_with(b'"x_padding":"' + b"." * asked.padding + b'"')
    mutate_scripts(asked.mutate)
    for protection in asked.without:
        WITHOUT[protection]()
    crew = make_crew(asked, settings)
    redis = connect(settings.redis_url, name="register")
    await write_card(redis, crew.queue, crew.card())
    await redis.aclose()
    worker = Worker(settings, crew)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.drain)
    return await worker.run(lambda: say(f"ready worker={asked.id}"))


if __name__ == "__main__":
    configure()
    raise SystemExit(asyncio.run(serve(arguments())))
