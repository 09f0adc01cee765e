"""What may stand in a request, what it becomes, and what is refused before a job is written."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from jitney.errors import InvalidJob
from jitney.keys import Keys
from jitney_api.fields import IGNORED, REFUSED, refuse_unsupported
from jitney_api.schemas import CHAT_ONLY, ChatRequest, CompletionRequest, JobRequest

USER: dict[str, Any] = {"role": "user", "content": "hello"}
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}

# vLLM's extra fields by name.
EXTRAS = (
    "top_k min_p repetition_penalty min_tokens stop_token_ids include_stop_str_in_output ignore_eos "
    "skip_special_tokens truncate_prompt_tokens prompt_logprobs allowed_token_ids bad_words echo "
    "add_generation_prompt continue_final_message priority request_id cache_salt"
)


async def accepted(worker: Any, asking: Any) -> Any:
    """The job that a request became; the request is answered."""
    asking = asyncio.ensure_future(asking)
    job = await worker.claim()
    await job.finish("ok")
    answer = await asking
    assert answer.status == 200
    return job.spec


async def refused(redis: Any, queue: str, answer: Any, status: int = 400) -> dict[str, Any]:
    """The error of a refusal, which has written nothing into the queue."""
    error = (await answer.json())["error"]
    assert answer.status == status, error
    assert sorted(error) == ["code", "message", "param", "type"]
    assert [key async for key in redis.scan_iter(f"{Keys(queue).prefix}:*")] == []
    return error


@pytest.mark.parametrize(
    ("params", "schema"),
    [
        (chat_create_params.CompletionCreateParamsBase, ChatRequest),
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
    ],
)
def test_every_documented_field_is_honoured_ignored_or_refused_by_name(params, schema):
    documented = {*params.__annotations__, "stream", *EXTRAS.split()}
    classes = [set(schema.model_fields), set(IGNORED), set(REFUSED)]
    assert documented - set.union(*classes) == set()


def test_no_field_is_in_two_classes():
    for schema in (ChatRequest, CompletionRequest, JobRequest):
        honoured = set(schema.model_fields)
        of_others = set() if schema is CompletionRequest else CHAT_ONLY
        assert honoured & (IGNORED | REFUSED.keys()) == of_others
    assert IGNORED & REFUSED.keys() == set()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_an_unsupported_field_is_refused_by_name_unless_it_changes_nothing(name):
    for neutral in REFUSED[name]:
        refuse_unsupported({name: neutral})
    with pytest.raises(InvalidJob, match=f"{name} is not supported yet") as error:
        refuse_unsupported({name: {"something": "else"}})
    assert (error.value.param, error.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize(
    "field",
    [
        {"best_of": 2},
        {"echo": True},
        {"suffix": "x"},
        {"guided_json": {"type": "object"}},
    ],
)
async def test_what_is_not_supported_writes_no_job(api, redis, field):
    error = await refused(redis, api.model, await api.chat(**field))
    assert error["param"] == next(iter(field))


async def test_hints_and_unknown_fields_change_nothing(api, worker):
    plain = await accepted(worker, api.chat(seed=1))
    hinted = await accepted(
        worker,
        api.chat(
            seed=1, user="u", store=True, safety_identifier="s", prompt_cache_key="k", foo={"bar": [1]}, n=1, tools=[]
        ),
    )
    assert hinted == plain


async def test_null_is_absent_everywhere(api, worker):
    plain = await accepted(worker, api.chat(seed=1))
    names = [name for name in {*ChatRequest.model_fields, *REFUSED, *IGNORED} if name not in ("model", "messages")]
    nulls = dict.fromkeys(names, None) | {"seed": 1}
    assert await accepted(worker, api.chat(**nulls)) == plain


async def test_options_arrive_in_the_job_under_their_own_names(api, worker):
    spec = await accepted(
        worker,
        api.chat(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            seed=7,
            stop=["a", "b"],
            stop_token_ids=[5],
            ignore_eos=True,
            n=3,
            min_p=0.1,
            presence_penalty=0.2,
            frequency_penalty=-0.3,
            repetition_penalty=1.4,
            logit_bias={"5": -1.5, "6": 2},
            allowed_token_ids=[5, 6],
            bad_words=["rude"],
            min_tokens=2,
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            truncate_prompt_tokens=-1,
            logprobs=True,
            top_logprobs=3,
            max_tokens=9,
            priority=-1,
            band="bulk",
            cache_salt="s",
            metadata={"k": "v"},
            timeout_s=60,
            queue_timeout_s=30,
            result_ttl_s=120,
        ),
    )
    assert spec.sampling.model_dump(exclude_defaults=True) == {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 7,
        "stop": ("a", "b"),
        "stop_token_ids": (5,),
        "ignore_eos": True,
        "logprobs": 3,
        "max_tokens": 9,
        "n": 3,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.4,
        "logit_bias": {5: -1.5, 6: 2.0},
        "allowed_token_ids": (5, 6),
        "bad_words": ("rude",),
        "min_tokens": 2,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "truncate_prompt_tokens": -1,
    }
    assert (spec.priority, spec.band, spec.cache_salt, spec.metadata) == (-1, "bulk", "s", {"k": "v"})
    assert (spec.timeout_s, spec.queue_timeout_s, spec.result_ttl_s) == (60, 30, 120)
    assert spec.on_disconnect == "cancel"


async def test_the_tenant_never_comes_from_the_body(api, worker, redis):
    assert (await accepted(worker, api.chat(tenant="somebody-else"))).tenant == "-"
    answer = await api.post("/v1/jobs", {"model": api.model, "prompt": "x", "tenant": "somebody-else"})
    assert answer.status == 400


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 7}, 7),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
    ],
)
async def test_a_chat_is_limited_by_max_completion_tokens_before_max_tokens(api, worker, fields, limit):
    assert (await accepted(worker, api.chat(**fields))).sampling.max_tokens == limit


async def test_a_completion_is_16_tokens_unless_asked_otherwise(api, worker):
    assert (await accepted(worker, api.complete())).sampling.max_tokens == 16
    assert (await accepted(worker, api.complete(max_tokens=3))).sampling.max_tokens == 3


@pytest.mark.parametrize(
    ("fields", "logprobs"), [({}, None), ({"logprobs": False}, None), ({"logprobs": True}, 0), ({"logprobs": 5}, 5)]
)
async def test_logprobs_mean_what_each_endpoint_documents(api, worker, fields, logprobs):
    ask = api.complete if fields.get("logprobs") == 5 else api.chat
    assert (await accepted(worker, ask(**fields))).sampling.logprobs == logprobs


@pytest.mark.parametrize(
    ("prompt", "stored"),
    [("hi", "hi"), (["hi"], "hi"), ([1, 2], (1, 2)), ([[1, 2]], (1, 2)), ("\u0000é🙂", "\u0000é🙂")],
)
async def test_a_prompt_has_four_shapes(api, worker, prompt, stored):
    assert (await accepted(worker, api.complete(prompt))).prompt == stored


@pytest.mark.parametrize(
    "prompt",
    [
        *("", [""], [], [[]], [""] * 2, ["a", "b"], [[1], [2]], [1, "a"], ["a", 1], [True], [1.5], [-1], [1000]),
        *([2**70], {"a": 1}, 5, [None], [[None]], [[["a"]]]),
    ],
)
async def test_a_prompt_of_another_shape_or_with_impossible_ids_is_refused(api, redis, prompt):
    answer = await api.complete(prompt)
    assert (await refused(redis, api.model, answer))["param"] in ("prompt", None)
    assert (await answer_status(api)) == 200


async def answer_status(api: Any) -> int:
    """The API still answers."""
    return (await api.get("/livez")).status


async def test_token_ids_beyond_the_context_are_refused_with_both_numbers(start_api, write_queue_card, redis):
    await write_queue_card(max_model_len=256)
    api = await start_api()
    error = await refused(redis, api.model, await api.complete([1] * 300))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    assert "300" in error["message"]
    assert "256" in error["message"]


@pytest.mark.parametrize(
    ("content", "stored"),
    [
        ("hi", "hi"),
        ("", ""),
        ([{"type": "text", "text": "hi"}], "hi"),
        ([{"type": "text", "text": "hi "}, {"type": "text", "text": "you"}], "hi you"),
    ],
)
@pytest.mark.parametrize("role", ["system", "user", "assistant"])
async def test_content_is_a_string_or_text_parts_for_every_role(api, worker, role, content, stored):
    spec = await accepted(worker, api.chat(messages=[{"role": role, "content": content}, USER]))
    assert spec.messages == ({"role": role, "content": stored}, USER)


async def test_developer_is_system_and_a_name_is_kept(api, worker):
    spec = await accepted(
        worker, api.chat(messages=[{"role": "developer", "content": "be brief"}, {**USER, "name": "ada", "foo": 1}])
    )
    assert spec.messages == ({"role": "system", "content": "be brief"}, {**USER, "name": "ada"})


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([USER] * 1_025, "messages"),
        ([1], "messages.0"),
        ([{"content": "x"}], "messages.0.role"),
        ([{"role": "pirate", "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0"),
        ([{"role": "user", "content": None}], "messages.0"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": []}], "messages.0.content"),
        ([USER, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages.1.content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "input_audio", "text": "x"}]}], "messages.0.content"),
        ([{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}], "messages.0.tool_calls.0.function"),
        ([USER | {"tool_calls": [CALL]}], "messages.0"),
        ([{"role": "assistant", "tool_calls": [CALL | {"id": ""}]}], "messages.0.tool_calls.0.id"),
        ([{"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}], "messages.0.tool_calls.0.type"),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "messages.0.function_call"),
        ([{"role": "tool", "content": "x"}], "messages.0"),
        ([{"role": "tool", "tool_call_id": "1"}], "messages.0"),
        ([USER | {"tool_call_id": "1"}], "messages.0"),
        ([{"role": "function", "name": "f", "content": "x"}], "messages.0.role"),
    ],
)
async def test_messages_of_another_shape_are_refused_by_the_place(api, redis, messages, param):
    assert (await refused(redis, api.model, await api.chat(messages=messages)))["param"] == param


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"seed": 2**63}, "seed"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 1_000_000}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"1000": 5}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"allowed_token_ids": [1_000]}, "allowed_token_ids"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"n": True}, "n"),
        ({"n": 1_000_000}, "n"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": "1"}, "presence_penalty"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"bad_words": "rude"}, "bad_words"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"min_tokens": 9, "max_completion_tokens": 8}, "min_tokens"),
        ({"skip_special_tokens": 0}, "skip_special_tokens"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop": [None]}, "stop.0"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"stop_token_ids": [None]}, "stop_token_ids.0"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [1_000]}, "stop_token_ids"),
        ({"ignore_eos": "yes"}, "ignore_eos"),
        ({"stream": "true"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"band": "urgent"}, "band"),
        ({"priority": 2**40}, "priority"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"on_disconnect": "explode"}, "on_disconnect"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"model": 5}, "model"),
        ({"model": ""}, "model"),
        ({"idempotency_key": ""}, "idempotency_key"),
        ({"idempotency_key": "k" * 257}, "idempotency_key"),
    ],
)
async def test_a_value_out_of_range_is_refused_by_name_beside_a_good_request(api, worker, redis, field, param):
    error = await refused(redis, api.model, await api.chat(**field))
    assert error["param"] == param
    assert param.split(".")[0] in error["message"]
    await accepted(worker, api.chat())


async def test_min_tokens_is_held_against_the_limit_that_a_completion_has_by_default(api, redis):
    """OpenAI's 16 where none is named: a job that could not keep both must not be written."""
    error = await refused(redis, api.model, await api.complete("x", min_tokens=17))
    assert (error["param"], "max_tokens=16" in error["message"]) == ("min_tokens", True)


@pytest.mark.parametrize(
    ("field", "held"),
    [
        *(({"top_k": value}, value) for value in (9_999_999, 0, -1)),
        *(({"temperature": value}, 0) for value in (1e-6, 0)),  # what is hardly above 0 is greedy
        ({"top_p": 1}, 1),
        *(({"stop": value}, ()) for value in (None, [])),
        *(({"stop": value}, ("x",)) for value in ("x", ["x"])),
        ({"stop": ["x"] * 5}, ("x",) * 5),
    ],
)
async def test_a_value_at_the_edge_of_its_range_is_accepted_and_held(api, worker, field, held):
    sampling = (await accepted(worker, api.chat(**field))).sampling
    assert [getattr(sampling, name) for name in field] == [held]


@pytest.mark.parametrize("missing", ["model", "messages"])
async def test_a_missing_field_is_named(api, redis, missing):
    body = {"model": api.model, "messages": [USER]}
    del body[missing]
    error = await refused(redis, api.model, await api.post("/v1/chat/completions", body))
    assert (error["param"], error["code"], error["message"]) == (missing, "missing_field", f"{missing} is required")


@pytest.mark.parametrize("name", ["no such", "a:b", "*", "../x", "{tag}", "x" * 300, "a\r\nb", "\0", "é"])
async def test_no_text_of_a_user_becomes_a_key_name(api, redis, name):
    error = await refused(redis, api.model, await api.chat(model=name), status=404)
    assert error["code"] == "model_not_found"
    assert len(error["message"]) < 1_100


async def test_an_error_never_echoes_a_whole_input(api, redis):
    secret = "secret " * 1_000
    answer = await api.chat(stop={"a": secret})
    body = await answer.body()
    assert answer.status == 400
    assert body.count(b"secret") < 10
    assert len(body) < 1_500


async def test_an_alias_leads_to_its_queue(api, worker, redis):
    from jitney.cards import write_alias

    await write_alias(redis, f"other-{api.model}", api.model)
    serving = asyncio.create_task(worker.serve("Hi"))
    answer = await api.chat(model=f"other-{api.model}")
    assert (await answer.json())["model"] == api.model
    await serving


async def test_a_number_json_has_no_word_for_is_refused(api, redis):
    body = json.dumps({"model": api.model, "messages": [USER], "temperature": float("nan")}).encode()
    error = await refused(redis, api.model, await api.post("/v1/chat/completions", body))
    assert error["code"] == "invalid_json"
