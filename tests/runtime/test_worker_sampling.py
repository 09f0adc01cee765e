"""Sampling options on their way from the client to the sampler and back, and how jobs with them are resumed."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from tests.engine.scripted_model import HashModel, ScriptedModel, prompt_logprob, solo
from tests.runtime.harness import LIVENESS_S, ByJob, StartWorker, Turnstile

from jitney import AsyncClient, JobFailed
from jitney.connection import Redis
from jitney.keys import new_job_id
from jitney.messages import Event
from jitney.queue import Append, Entry, Queue, pack_ids
from jitney_worker.engine.protocol import ModelOutput, SchedulerOutput
from jitney_worker.engine.sequence import LogitRules, SequenceId, SequenceParams, SequenceRequest
from jitney_worker.text.tokenizer import Tokenizer

PROMPT = [3, 4, 5]
SPECIAL = "<|im_start|>"


class Watched(HashModel):
    """Remembers the parameters that reach the model, by choice."""

    def __init__(self) -> None:
        super().__init__()
        self.params: dict[int, SequenceParams] = {}

    def execute(self, scheduled: SchedulerOutput) -> ModelOutput:
        for item in scheduled.scheduled:
            self.params[item.sequence.params.choice] = item.sequence.params
        return super().execute(scheduled)


def said(choice: int, max_tokens: int, prompt: list[int] = PROMPT) -> tuple[int, ...]:
    """What the hash model says as that choice."""
    params = SequenceParams(max_tokens, choice=choice)
    return solo(SequenceRequest(SequenceId("solo"), tuple(prompt), params, (0, 0.0, 0, 0)))[0]


async def events_of(client: AsyncClient, prompt: object = PROMPT, **options: Any) -> list[Event]:
    job = await client.enqueue(prompt, **{"ignore_eos": True, **options})  # type: ignore[arg-type]
    return [event async for event in job.stream()]


def text_of(events: list[Event], choice: int = 0) -> str:
    return "".join(event.text for event in events if event.choice == choice)


def ids_of(events: list[Event], choice: int = 0) -> tuple[int, ...]:
    return tuple(token_id for event in events if event.choice == choice for token_id in event.token_ids)


async def begun_elsewhere(queue: Queue, prompt_ids: list[int], *tokens: Event) -> None:
    """The only job has had an owner that stored these ids of its prompt, said these tokens and gave it back."""
    (delivery,) = (await queue.claim("other", "n1", credit=1, fingerprint="hash.1", lease_s=60)).deliveries
    started = Event("started", 1, attempt=1, prompt_tokens=len(prompt_ids), cached_tokens=0)
    append = Append(
        delivery.id,
        delivery.fence,
        1,
        sum(len(event.token_ids) for event in tokens),
        [event.encode() for event in (started, *tokens)],
        prompt_ids=pack_ids(prompt_ids),
        num_prompt_tokens=len(prompt_ids),
    )
    assert await queue.append([append]) == []
    await queue.release(delivery.id, delivery.fence)


async def test_every_option_reaches_the_model_by_its_name(
    start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer
) -> None:
    model = Watched()
    word = tokenizer.encode_part("sea", "text")
    async with start_worker(model):
        await events_of(
            client,
            max_tokens=9,
            min_tokens=4,
            min_p=0.25,
            presence_penalty=0.5,
            frequency_penalty=-1.5,
            repetition_penalty=1.25,
            logit_bias={"7": 2.5, 9: -100, 11: 0},
            allowed_token_ids=[7, 9, 7, 300],
            bad_words=["sea"],
            stop_token_ids=[40],
        )
    params = model.params[0]
    assert (params.min_p, params.min_tokens, params.stop_token_ids) == (0.25, 4, frozenset({40}))
    assert params.rules is not None
    assert params.rules.bad_words[0] == tuple(word)
    assert params.rules == LogitRules((7, 9, 300), params.rules.bad_words, ((7, 2.5), (9, -100.0)), 1.25, -1.5, 0.5)


async def test_a_job_without_options_brings_no_rules(start_worker: StartWorker, client: AsyncClient) -> None:
    model = Watched()
    async with start_worker(model):
        await events_of(client, max_tokens=2, repetition_penalty=1.0, presence_penalty=0, logit_bias={}, bad_words=[])
    assert model.params[0].rules is None


async def test_four_choices_each_have_their_answer_and_ending_and_usage_counts_them_all(
    start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer
) -> None:
    """B18: the stop token ends them at different times, and what goes on is not disturbed by it."""
    stop = said(0, 30)[2]
    async with start_worker():
        job = await client.enqueue(PROMPT, n=4, max_tokens=30, ignore_eos=True, stop_token_ids=[stop])
        result = await job.result(LIVENESS_S)
        events = [event async for event in job.stream()]
    assert [choice.index for choice in result.choices] == [0, 1, 2, 3]
    for choice in result.choices:
        whole = said(choice.index, 30)
        end = whole.index(stop) + 1 if stop in whole else 30
        assert choice.token_ids == whole[:end]
        assert choice.finish_reason == ("stop" if stop in whole else "length")
        assert choice.text == tokenizer.decode(whole[: end - (stop in whole)])
    assert result.choices[0].finish_reason == "stop"
    assert any(choice.finish_reason == "length" for choice in result.choices)
    assert result.usage["prompt_tokens"] == 3
    assert result.usage["completion_tokens"] == sum(len(choice.token_ids) for choice in result.choices)
    assert [event.type for event in events].count("finished") == 1


async def test_the_prompt_of_a_job_with_choices_is_computed_once(
    start_worker: StartWorker, client: AsyncClient
) -> None:
    model = HashModel()
    async with start_worker(model, engine={"enable_prefix_caching": False}):
        await client.generate(list(range(1, 41)), n=3, max_tokens=2, ignore_eos=True)
    assert [sorted(computed.values()) for _, computed in model.steps] == [[40], [1, 1, 1], [1, 1]]


async def test_a_worker_counts_the_choices_of_a_job_as_the_seats_that_they_are(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """It cannot know before the first claim. When one of the four jobs that it has ends, three are still enough."""
    turnstile = Turnstile(HashModel())
    queue = Queue(redis, queue_name)
    jobs = [await client.enqueue([n + 1], n=3, max_tokens=4, ignore_eos=True) for n in range(8)]
    async with start_worker(turnstile, engine={"max_num_seqs": 3}):
        try:
            while jobs[1].id not in (step := await turnstile.until_step()) or jobs[0].id in step:
                turnstile.pass_one()
            await jobs[0].result(LIVENESS_S)
            assert (await queue.counts())[0] >= 4
        finally:
            turnstile.open()
        for n, job in enumerate(jobs):
            result = await job.result(LIVENESS_S)
            assert [choice.token_ids for choice in result.choices] == [said(choice, 4, [n + 1]) for choice in range(3)]


async def test_a_job_with_more_choices_than_seats_ends_all_the_same(
    start_worker: StartWorker, client: AsyncClient
) -> None:
    async with start_worker(engine={"max_num_seqs": 2}):
        result = await client.generate(PROMPT, n=5, max_tokens=6, ignore_eos=True)
    assert [choice.token_ids for choice in result.choices] == [said(choice, 6) for choice in range(5)]


async def test_choices_are_resumed_each_where_its_own_part_of_the_log_ends(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """Choice 0 had ended by a stop string, 1 was in the middle, 2 had not begun: one ends, two go on."""
    job = await client.enqueue(PROMPT, n=3, max_tokens=12, ignore_eos=True, stop=["never said"])
    await begun_elsewhere(
        Queue(redis, queue_name),
        PROMPT,
        Event("tokens", 2, index=0, token_ids=said(0, 12)[:4], text="", finish_reason="stop"),
        Event("tokens", 3, choice=1, index=0, token_ids=said(1, 12)[:5], text=""),
    )
    model = Watched()
    async with start_worker(model):
        result = await job.result(LIVENESS_S)
        events = [event async for event in job.stream()]
    assert [choice.token_ids for choice in result.choices] == [said(0, 12)[:4], said(1, 12), said(2, 12)]
    assert [choice.finish_reason for choice in result.choices] == ["stop", "length", "length"]
    assert [event.resumed_tokens for event in events if event.type == "started"] == [None, 9]
    indices = [(event.choice, event.index) for event in events if event.type == "tokens" and event.seq > 3]
    assert [next(found for found in indices if found[0] == choice) for choice in (1, 2)] == [(1, 5), (2, 0)]
    assert set(model.params) == {1, 2}
    assert result.usage["completion_tokens"] == 28


async def test_a_stop_string_before_min_tokens_is_text_and_one_after_ends_the_answer(
    start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer
) -> None:
    """B25, through the whole worker: engine and publisher agree on the token, before and after."""
    letters = [tokenizer.encode_part(letter, "text")[0] for letter in "abcabcabcabc"]
    scripts: ByJob[Any] = ByJob()
    async with start_worker(ScriptedModel(scripts)):
        for min_tokens, text in ((0, "a"), (2, "a"), (3, "abca"), (5, "abca"), (6, "abcabca"), (12, "abcabcabcabc")):
            job = await client.enqueue(PROMPT, max_tokens=12, min_tokens=min_tokens, stop=["bc"], ignore_eos=True)
            scripts[job.id] = letters
            result = await job.result(LIVENESS_S)
            assert result.text == text, min_tokens
            assert len(result.token_ids) == len(text) + (2 if len(text) < 12 else 0)


async def test_the_stop_string_is_in_the_text_if_the_job_wants_it(
    start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer
) -> None:
    letters = [tokenizer.encode_part(letter, "text")[0] for letter in "abcdef"]
    scripts: ByJob[Any] = ByJob()
    async with start_worker(ScriptedModel(scripts)):
        for options, text in (
            ({"stop": ["cd"]}, "ab"),
            ({"stop": ["cd"], "include_stop_str_in_output": True}, "abcd"),
            ({"stop_token_ids": letters[3:4]}, "abc"),
            ({"stop_token_ids": letters[3:4], "include_stop_str_in_output": True}, "abcd"),
        ):
            job = await client.enqueue(PROMPT, max_tokens=6, ignore_eos=True, **options)  # type: ignore[arg-type]
            scripts[job.id] = letters
            result = await job.result(LIVENESS_S)
            assert (result.text, len(result.token_ids), result.finish_reason) == (text, 4, "stop")


async def test_special_tokens_are_text_if_the_job_wants_them_and_may_then_stop_it(
    start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer
) -> None:
    (special,) = tokenizer.encode_part(SPECIAL, "text")
    word = tokenizer.encode_part("a", "text")[0]
    scripts: ByJob[Any] = ByJob()
    async with start_worker(ScriptedModel(scripts)):
        for options, text, num_tokens in (
            ({}, "aaa", 4),
            ({"skip_special_tokens": False}, f"a{SPECIAL}aa", 4),
            ({"skip_special_tokens": False, "stop": [SPECIAL]}, "a", 2),
            ({"stop": [SPECIAL]}, "aaa", 4),
        ):
            job = await client.enqueue(PROMPT, max_tokens=4, ignore_eos=True, **options)  # type: ignore[arg-type]
            scripts[job.id] = [word, special, word, word]
            result = await job.result(LIVENESS_S)
            assert (result.text, len(result.token_ids)) == (text, num_tokens)


async def test_echo_begins_each_choice_with_the_prompt_as_it_was_sent(
    start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer
) -> None:
    text = "Once  upon a time"
    ids = tokenizer.encode_prompt(text)
    async with start_worker():
        echoed = await events_of(client, text, echo=True, n=2, max_tokens=5)
        by_ids = await events_of(client, ids, echo=True, max_tokens=5)
        cut = await events_of(client, text, echo=True, truncate_prompt_tokens=2, max_tokens=5)
    for choice in (0, 1):
        answer = said(choice, 5, ids)
        assert text_of(echoed, choice) == text + tokenizer.decode(answer)
        assert ids_of(echoed, choice) == answer
        assert next(event.index for event in echoed if event.type == "tokens" and event.choice == choice) == 0
    assert text_of(by_ids) == tokenizer.decode(ids) + tokenizer.decode(said(0, 5, ids))
    assert text_of(cut) == tokenizer.decode(ids[-2:]) + tokenizer.decode(said(0, 5, ids[-2:]))
    assert echoed[0].type == "started", "the echo is no progress: it comes with the first token"


async def test_what_has_been_echoed_is_not_echoed_by_the_next_owner(
    start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer, redis: Redis, queue_name: str
) -> None:
    job = await client.enqueue(PROMPT, echo=True, max_tokens=6, ignore_eos=True)
    answer = said(0, 6)
    prompt_text, first = tokenizer.decode(PROMPT), tokenizer.decode(answer[:1])
    begun = Event("tokens", 2, index=0, token_ids=answer[:1], text=prompt_text + first)
    await begun_elsewhere(Queue(redis, queue_name), PROMPT, begun)
    async with start_worker():
        result = await job.result(LIVENESS_S)
    assert result.token_ids == answer
    assert result.text == prompt_text + tokenizer.decode(answer)


@pytest.mark.parametrize(
    ("keep", "max_tokens", "kept"), [(3, 5, 3), (40, 5, 40), (41, 5, 40), (-1, 5, 40), (-1, 490, 22)]
)
async def test_a_prompt_is_cut_from_the_left_before_it_is_held_against_the_context(
    start_worker: StartWorker, client: AsyncClient, keep: int, max_tokens: int, kept: int
) -> None:
    """The context is 512. -1 leaves room for the answer; what is longer than it may be is refused if not cut."""
    prompt = [n % 90 + 1 for n in range(40)]
    async with start_worker():
        events = await events_of(client, prompt, truncate_prompt_tokens=keep, max_tokens=max_tokens)
    assert events[0].prompt_tokens == kept
    assert ids_of(events)[:4] == said(0, 4, prompt[-kept:])


async def test_a_text_longer_than_the_context_is_served_if_it_may_be_cut(
    start_worker: StartWorker, client: AsyncClient
) -> None:
    text = "over and over again " * 300
    async with start_worker():
        with pytest.raises(JobFailed, match="at most 511 fit"):
            await client.generate(text, max_tokens=5)
        events = await events_of(client, text, max_tokens=5, truncate_prompt_tokens=-1)
    assert events[0].prompt_tokens == 507
    assert len(ids_of(events)) == 5


async def test_a_prompt_is_cut_once_whatever_the_next_owner_would_have_kept(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """With -1 it depends on the owner's cache; the log goes on from the ids that the first one stored."""
    job = await client.enqueue([1, 2, 3, 4, 5, 6], truncate_prompt_tokens=-1, max_tokens=508, ignore_eos=True)
    kept = [2, 3, 4, 5, 6]
    begun = Event("tokens", 2, index=0, token_ids=said(0, 1, kept), text="")
    await begun_elsewhere(Queue(redis, queue_name), kept, begun)
    async with start_worker():
        result = await job.result(LIVENESS_S)
    assert result.token_ids == said(0, 507, kept)
    assert result.usage["prompt_tokens"] == 5


@pytest.mark.parametrize("n", [1, 3])
async def test_the_prompts_log_probabilities_stand_once_in_started(
    start_worker: StartWorker, client: AsyncClient, n: int
) -> None:
    async with start_worker():
        events = await events_of(client, prompt_logprobs=0, n=n, max_tokens=4)
        single = await events_of(client, [9], prompt_logprobs=0, max_tokens=2)
        result = await client.generate(PROMPT, prompt_logprobs=0, n=n, max_tokens=4)
    found = events[0].prompt_logprobs
    assert found is not None
    assert [None if entry is None else (entry["token_id"], entry["logprob"]) for entry in found] == [
        None,
        (4, prompt_logprob(1, 4).logprob),
        (5, prompt_logprob(2, 5).logprob),
    ]
    assert [event.prompt_logprobs for event in events[1:]] == [None] * (len(events) - 1)
    assert single[0].prompt_logprobs == (None,)
    assert result.prompt_logprobs == found


async def test_the_prompts_log_probabilities_are_not_said_again_by_the_next_owner(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    queue = Queue(redis, queue_name)
    job = await client.enqueue(PROMPT, prompt_logprobs=0, max_tokens=6, ignore_eos=True)
    claimed = await queue.claim("other", "n1", credit=1, fingerprint="hash.1", lease_s=60)
    (delivery,) = claimed.deliveries
    written = [
        Event("started", 1, attempt=1, prompt_tokens=3, cached_tokens=0, prompt_logprobs=(None, {}, {})),
        Event("tokens", 2, index=0, token_ids=said(0, 6)[:1], text=""),
    ]
    append = Append(
        delivery.id,
        delivery.fence,
        1,
        1,
        [event.encode() for event in written],
        prompt_ids=pack_ids(PROMPT),
        num_prompt_tokens=3,
    )
    assert await queue.append([append]) == []
    await queue.release(delivery.id, delivery.fence)
    async with start_worker():
        events = [event async for event in job.stream()]
    assert ids_of(events) == said(0, 6)
    started = [event.prompt_logprobs for event in events if event.type == "started"]
    assert started == [(None, {}, {}), None]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": [1], "sampling": {"logit_bias": {"5000": 1}}}, "logit_bias holds token id 5000"),
        ({"prompt": [1], "sampling": {"allowed_token_ids": [2, 5000]}}, "allowed_token_ids holds token id 5000"),
        ({"prompt": [1], "sampling": {"logit_bias": {"abc": 1}}}, "'abc' is not a token id"),
        ({"prompt": [1], "sampling": {"n": 99}}, "sampling.n"),
        ({"prompt": [1], "sampling": {"min_tokens": 3, "max_tokens": 2}}, "more than max_tokens=2"),
        ({"messages": [{"role": "user", "content": "x"}], "sampling": {"echo": True}}, "echo needs prompt"),
        (
            {"prompt": [1], "sampling": {"min_tokens": 1, "allowed_token_ids": [7], "stop_token_ids": [7]}},
            "holds no others",
        ),
    ],
)
async def test_options_that_this_model_cannot_serve_are_refused_by_name(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, body: dict[str, Any], words: str
) -> None:
    """B22: whatever stands in Redis, its neighbour does not notice."""
    stranger = new_job_id(queue_name)
    async with start_worker():
        await Queue(redis, queue_name).enqueue(Entry(stranger, orjson.dumps({"v": 1, **body}), "digest"))
        after = await client.enqueue(PROMPT, max_tokens=8, ignore_eos=True)
        with pytest.raises(JobFailed) as caught:
            await client.job(stranger).result(LIVENESS_S)
        assert words in str(caught.value.error["message"])
        assert (await after.result(LIVENESS_S)).token_ids == said(0, 8)
