"""`pooling` at the door: what goes beside it, and how an embedding travels."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from tests.client.scripted_worker import ScriptedWorker
from tests.client.test_cli import jitney

from jitney import AsyncClient, InvalidJob
from jitney.keys import JobId
from jitney.messages import Event, JobSpec
from jitney.result import Collector
from jitney.sampling import SamplingParams, sampling_params
from jitney.vectors import pack_embedding, unpack_embedding

NUMBERS = (0.1, -0.5, 1e-30, 0.70710677)
FLOAT32S = struct.pack("<4f", *NUMBERS)
GIVEN: dict[str, Any] = {
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "max_tokens": 5,
    "stop": ["x"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "logprobs": 0,
    "n": 2,
    "min_p": 0.5,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 1.5,
    "logit_bias": {"5": 1},
    "allowed_token_ids": [5],
    "bad_words": ["x"],
    "min_tokens": 1,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "prompt_logprobs": 0,
    "echo": True,
    "structured_outputs": {"choice": ["yes"]},
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_chooses_tokens_is_refused_by_name_beside_it(name: str) -> None:
    with pytest.raises(InvalidJob, match=rf"^pooling: .*leave {name} out") as refused:
        sampling_params(pooling="last", **{name: GIVEN[name]})
    assert refused.value.param == "pooling"


def test_every_option_is_either_refused_or_means_something_beside_it() -> None:
    assert SamplingParams.model_fields.keys() - GIVEN.keys() == {"pooling", "seed", "truncate_prompt_tokens"}
    plain = {"n": 1, "temperature": 1.0, "stop": [], "seed": 3, "truncate_prompt_tokens": 4}
    assert sampling_params(pooling="mean", **plain).pooling == "mean"


def test_another_pooling_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidJob, match=r"pooling: .*'last' or 'mean'"):
        sampling_params(pooling="cls")


def test_a_worker_that_does_not_know_the_field_cannot_overlook_it() -> None:
    """It stands among the sampling options, of which every version refuses those that it does not know."""
    body = JobSpec(prompt="x", sampling=SamplingParams(pooling="last")).encode()
    with pytest.raises(InvalidJob) as refused:
        JobSpec.decode(body.replace(b"pooling", b"poolinx"))
    assert refused.value.code == "unknown_field"


def test_an_embedding_comes_back_as_the_numbers_that_it_was() -> None:
    event = Event("finished", 1, choices=(), usage={}, embedding=pack_embedding(FLOAT32S))
    result = Collector(JobId("q.x")).add(Event.decode(event.encode()))
    assert result is not None
    assert result.embedding == struct.unpack("<4f", FLOAT32S)
    assert result.packed_embedding == event.embedding


@pytest.mark.parametrize("packed", ["AAA=", "*", "AAAAA"])
def test_what_is_no_row_of_float32_is_refused(packed: str) -> None:
    with pytest.raises(ValueError, match=r"float32|base64|padding"):
        unpack_embedding(packed)


async def test_the_command_asks_for_one_without_a_limit_of_tokens(
    redis_url: str, client: AsyncClient, worker: ScriptedWorker, write_queue_card: Any
) -> None:
    await write_queue_card(hidden_size=4)
    arguments = ("enqueue", "x", "--pooling", "mean", "--detach", "--queue", worker.queue.name)
    assert (await jitney(*arguments, redis_url=redis_url)).code == 0
    sampling = (await worker.take()).spec.sampling
    assert (sampling.pooling, sampling.max_tokens) == ("mean", None)
