"""Structured answers as users meet them: the `openai` SDK's helpers, and a worker killed in the middle of JSON."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Literal

from openai import OpenAI
from pydantic import BaseModel, ConfigDict, Field
from tests.e2e.programs import program, words
from tests.e2e.test_up import up

from jitney import Client


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")

    label: Literal["sail", "oar"]
    count: int = Field(ge=0, le=99)


class Boat(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    kind: Literal["ship", "raft"]
    parts: list[Part] = Field(min_length=1, max_length=3)


ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Describe a boat."}],
    "temperature": 0.9,
    "seed": 3,
    "max_tokens": 300,
    "response_format": Boat,
}


def test_the_openai_sdk_parses_answers_and_streams_into_a_model(tiny_model: Path, tmp_path: Path) -> None:
    with program(*up(tiny_model, tmp_path)) as stack:
        ready = words(stack.until_line("ready "))
        openai = OpenAI(base_url=f"{ready['api']}/v1", api_key="none", max_retries=0)
        whole = openai.chat.completions.parse(model=ready["queue"], **ASKED)
        boat = whole.choices[0].message.parsed
        assert isinstance(boat, Boat)
        assert whole.choices[0].finish_reason == "stop"
        with openai.chat.completions.stream(model=ready["queue"], **ASKED) as stream:
            deltas = [event.delta for event in stream if event.type == "content.delta"]
            final = stream.get_final_completion()
        assert final.choices[0].message.parsed == boat
        assert "".join(deltas) == whole.choices[0].message.content == boat.model_dump_json()


LONG: dict[str, Any] = {
    "structured_outputs": {
        "json": {"type": "array", "items": Boat.model_json_schema()["$defs"]["Part"], "minItems": 40, "maxItems": 60}
    },
    "max_tokens": 1_500,
    "temperature": 0.8,
    "seed": 11,
}


def test_a_worker_killed_in_the_middle_of_json_changes_no_byte_of_it(
    redis_url: str, queue_name: str, tiny_model: Path
) -> None:
    """Two real workers; the one that has begun is killed, and the other goes on from the log."""
    options = ("--model", str(tiny_model), "--redis-url", redis_url, "--queue", queue_name, "--dtype", "float32")
    options += ("--num-kv-blocks", "200", "--num-threads", "1", "--lease-s", "4")
    environment = {"JITNEY_WORKER__PUBLISH_INTERVAL_S": "0"}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(program("worker", *options, environment=environment))
        first.until_line("ready ")
        client = stack.enter_context(Client(redis_url, queue=queue_name))
        undisturbed = client.generate([5, 6, 7], **LONG)
        assert undisturbed.finish_reason == "stop"
        job = client.enqueue([5, 6, 7], **LONG)
        shown = ""
        for event in job.stream():
            shown += event.text
            if len(shown) > 60:
                break
        first.kill()
        first.wait()
        assert job.status().state == "running"
        stack.enter_context(program("worker", *options, environment=environment)).until_line("ready ")
        result = job.result(timeout_s=90)
        events = list(job.stream())
    assert (result.text, result.token_ids) == (undisturbed.text, undisturbed.token_ids)
    assert sum(event.type == "started" for event in events) == 2
    assert shown == undisturbed.text[: len(shown)]
