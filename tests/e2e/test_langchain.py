"""LangChain's ChatOpenAI against the whole stack with a real model."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field, SecretStr
from tests.e2e.conftest import Stack

QUESTION = [SystemMessage("Be brief."), HumanMessage("What is the capital of France?")]
CITIES = ("France", "Italy", "Spain", "Japan", "Egypt", "Peru")


def chat(stack: Stack, **options: Any) -> ChatOpenAI:
    given: dict[str, Any] = {"model": stack.model, "temperature": 0, "max_completion_tokens": 24, **options}
    return ChatOpenAI(base_url=stack.base_url, api_key=SecretStr("none"), max_retries=0, **given)


def test_invoke_and_stream_say_the_same_with_the_same_usage(real_stack: Stack) -> None:
    model = chat(real_stack, stream_usage=True)
    whole = model.invoke(QUESTION)
    assert "Paris" in whole.text
    assert whole.response_metadata["finish_reason"] == "stop"
    chunks = list(model.stream(QUESTION))
    assert sum(bool(chunk.text) for chunk in chunks) > 1
    added: AIMessageChunk = chunks[0]
    for chunk in chunks[1:]:
        added += chunk
    assert added.text == whole.text
    assert added.response_metadata["finish_reason"] == "stop"
    assert whole.usage_metadata is not None
    assert added.usage_metadata is not None
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert added.usage_metadata[name] == whole.usage_metadata[name]


async def test_a_batch_gives_each_prompt_the_answer_that_it_gets_alone(real_stack: Stack) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief."), ("human", "What is the capital of {country}?")])
    chain = prompt | chat(real_stack)
    asked = [{"country": country} for country in CITIES]
    together = await chain.abatch(asked)
    alone = [await asyncio.to_thread(chain.invoke, one) for one in asked]
    assert [answer.text for answer in together] == [answer.text for answer in alone]
    assert len({answer.text for answer in alone}) == len(CITIES)


class Boat(BaseModel):
    """A boat."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    kind: Literal["ship", "raft"]
    oars: int = Field(ge=0, le=9)


# Its own: it serializes, as any message, the one that the official client parsed for it.
@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
def test_structured_output_is_an_object_of_the_class_whole_and_streamed(real_stack: Stack) -> None:
    model = chat(real_stack, temperature=0.9, seed=3, max_completion_tokens=200)
    asking = model.with_structured_output(Boat, method="json_schema", include_raw=True)
    answer = asking.invoke("Describe a boat.")
    assert isinstance(answer, dict)
    assert answer["parsing_error"] is None
    boat = answer["parsed"]
    assert isinstance(boat, Boat)
    assert answer["raw"].text == boat.model_dump_json()
    *_, last = model.with_structured_output(Boat, method="json_schema").stream("Describe a boat.")
    assert last == boat


def test_log_probabilities_and_stop_strings_reach_it(real_stack: Stack) -> None:
    answer = chat(real_stack, logprobs=True, top_logprobs=2).invoke(QUESTION, stop=[" Paris"])
    assert answer.text == "The capital of France is"
    entries = answer.response_metadata["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries).startswith(answer.text)
    assert {len(entry["top_logprobs"]) for entry in entries} == {2}


def test_a_refusal_is_an_error_of_the_official_client_under_it(real_stack: Stack) -> None:
    with pytest.raises(openai.NotFoundError, match="unknown model or queue 'no-such-model'"):
        chat(real_stack, model="no-such-model").invoke(QUESTION)
    with pytest.raises(openai.BadRequestError, match="at most 8191 fit"):
        chat(real_stack).invoke("word " * 9_000)
