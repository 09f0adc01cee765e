"""What a step is made of: clocks around the parts of an engine, put there from outside.

The engine has no hooks for this, so that a step costs nothing for not being watched.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

from jitney_worker.bench.percentiles import percentile
from jitney_worker.engine.engine import LocalEngine
from jitney_worker.engine.protocol import ModelOutput, SchedulerOutput

_DECODER_PARTS = ("forward", "logits", "choose")


class StepProfile:
    """Clocks of one engine, from the moment this is made.

    schedule, commit: of the scheduler. forward: hidden states of all tokens. logits: the last matrix product, for
    sampled rows. choose: the same with the drawing of tokens, by decoders that do both at once. runner: everything
    else in the runner, which is making the step's tensors, and drawing from logits. engine: everything else in a
    step. between: what its driver does from one step to the next.
    """

    def __init__(self, engine: LocalEngine) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._steps: list[float] = []
        self._num_rows = self._num_tokens = 0
        scheduler, runner = engine._scheduler, engine._runner
        self._clock(scheduler, "schedule")
        self._clock(scheduler, "commit")
        self._count_rows(runner)
        decoder = getattr(runner, "decoder", None)
        for name in _DECODER_PARTS:
            if hasattr(decoder, name):
                self._clock(decoder, name)
        self._clock_steps(engine)

    def reset(self) -> None:
        """Forget what has been seen so far, such as the warm-up."""
        self._seconds.clear()
        self._steps.clear()
        self._num_rows = self._num_tokens = 0

    def report(self, wall_s: float) -> dict[str, Any]:
        """Means per step in milliseconds, of the steps since the last `reset`, which took `wall_s` in all."""
        num_steps = len(self._steps)
        if not num_steps:
            return {"num_steps": 0}
        seconds = dict(self._seconds)
        execute, in_steps = seconds.pop("execute"), sum(self._steps)
        seconds["runner"] = execute - sum(seconds.get(name, 0.0) for name in _DECODER_PARTS)
        seconds["engine"] = in_steps - execute - seconds["schedule"] - seconds["commit"]
        seconds["between"] = max(0.0, wall_s - in_steps)
        return {
            "num_steps": num_steps,
            "mean_batch": round(self._num_rows / num_steps, 2),
            "mean_tokens": round(self._num_tokens / num_steps, 2),
            "step_ms": {
                "mean": _ms(in_steps / num_steps),
                "p50": _ms(percentile(self._steps, 0.5)),
                "p99": _ms(percentile(self._steps, 0.99)),
            },
            "parts_ms": {name: _ms(spent / num_steps) for name, spent in sorted(seconds.items())},
        }

    def _clock(self, owner: Any, name: str) -> None:
        """Put a clock around a method of this one object; its class stays as it is."""
        method: Callable[..., Any] = getattr(owner, name)
        seconds = self._seconds

        @wraps(method)
        def clocked(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                seconds[name] += time.perf_counter() - start

        setattr(owner, name, clocked)

    def _count_rows(self, runner: Any) -> None:
        execute: Callable[[SchedulerOutput], ModelOutput] = runner.execute

        def counted(scheduled: SchedulerOutput) -> ModelOutput:
            self._num_rows += len(scheduled.scheduled)
            self._num_tokens += scheduled.num_tokens
            return execute(scheduled)

        runner.execute = counted
        self._clock(runner, "execute")

    def _clock_steps(self, engine: LocalEngine) -> None:
        step = engine.step

        def clocked() -> Any:
            start = time.perf_counter()
            try:
                return step()
            finally:
                self._steps.append(time.perf_counter() - start)

        engine.step = clocked  # type: ignore[method-assign]


def _ms(seconds: float) -> float:
    return round(seconds * 1_000, 4)
