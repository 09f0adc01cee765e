"""A job's whole journey: enqueued by the client, run by a worker, read back over its channel."""

from __future__ import annotations

import asyncio

import orjson
import pytest
from tests.engine.scripted_model import HashModel, ScriptedModel
from tests.runtime.harness import LIVENESS_S, ByJob, StartWorker, Turnstile, expected

from jitney import AsyncClient, InvalidJob, JobFailed
from jitney.connection import Redis
from jitney.keys import Keys, new_job_id
from jitney.messages import Event
from jitney.queue import Append, Entry, Queue, pack_ids
from jitney_worker.engine.sequence import SequenceId
from jitney_worker.text.tokenizer import Tokenizer


async def test_every_event_of_a_job_arrives_in_order_and_the_answer_is_the_models(
    start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer
) -> None:
    prompt = [5, 6, 7]
    async with start_worker():
        job = await client.enqueue(prompt, max_tokens=20, ignore_eos=True, temperature=0)
        events = [event async for event in job.stream()]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert events[0].type == "started"
    assert (events[0].prompt_tokens, events[0].attempt) == (3, 1)
    assert events[-1].type == "finished"
    tokens = [event for event in events if event.type == "tokens"]
    ids = tuple(token for event in tokens for token in event.token_ids)
    assert ids == expected(prompt, 20)
    assert [event.index for event in tokens] == [sum(len(e.token_ids) for e in tokens[:n]) for n in range(len(tokens))]
    assert "".join(event.text for event in tokens) == tokenizer.decode(ids)
    assert tokens[-1].finish_reason == "length"
    assert events[-1].usage == {"prompt_tokens": 3, "completion_tokens": 20, "cached_tokens": 0}


async def test_two_hundred_jobs_on_four_seats_each_get_their_own_answer(
    start_worker: StartWorker, client: AsyncClient
) -> None:
    async with start_worker():
        jobs = [
            await client.enqueue([n % 90 + 1, n // 90 + 1], max_tokens=n % 7 + 1, ignore_eos=True) for n in range(200)
        ]
        results = await asyncio.gather(*(job.result(LIVENESS_S) for job in jobs))
    for n, result in enumerate(results):
        assert result.token_ids == expected([n % 90 + 1, n // 90 + 1], n % 7 + 1), n


async def test_a_job_enqueued_while_all_seats_are_taken_joins_at_the_first_step_after_one_frees(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    turnstile = Turnstile(HashModel())
    async with start_worker(turnstile, engine={"max_num_seqs": 2}):
        try:
            short = await client.enqueue([1], max_tokens=4, ignore_eos=True)
            long = await client.enqueue([2], max_tokens=12, ignore_eos=True)
            seated = set[str]()
            while len(seated) < 2:  # both may not be claimed by the same step
                seated = set(await turnstile.until_step())
                if len(seated) < 2:
                    turnstile.pass_one()
            late = await client.enqueue([3], max_tokens=3, ignore_eos=True)
            await _until_claimed(client, late.id)
            while short.id in set(turnstile.steps[-1]):
                turnstile.pass_one()
                now = await turnstile.until_step()
            assert set(now) == {long.id, late.id}
        finally:
            turnstile.open()
        await asyncio.gather(*(job.result(LIVENESS_S) for job in (short, long, late)))
    # Every step from the long job's first to its last has it in: nobody waited for anybody's end.
    with_long = [long.id in step for step in turnstile.steps]
    first, last = with_long.index(True), len(with_long) - 1 - with_long[::-1].index(True)
    assert all(with_long[first : last + 1])
    assert sum(with_long) == 12


async def _until_claimed(client: AsyncClient, job_id: str) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while (await client.job(job_id).status()).state != "running":
            pass


async def test_a_worker_claims_no_more_than_its_seats_and_one_ahead(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    turnstile = Turnstile(HashModel())
    queue = Queue(redis, queue_name)
    jobs = [await client.enqueue([n + 1], max_tokens=6, ignore_eos=True) for n in range(10)]
    async with start_worker(turnstile, engine={"max_num_seqs": 3}):
        try:
            while len(await turnstile.until_step()) < 3:
                turnstile.pass_one()
            assert (await queue.counts())[0] == 6
        finally:
            turnstile.open()
        for n, job in enumerate(jobs):
            assert (await job.result(LIVENESS_S)).token_ids == expected([n + 1], 6)


async def test_a_stop_string_ends_the_text_before_it_and_counts_its_tokens(
    start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer
) -> None:
    ids = tokenizer.encode_prompt("alpha beta gamma delta")
    reader = ScriptedModel(ByJob())
    async with start_worker(reader):
        job = await client.enqueue([1], max_tokens=60, stop=["beta gamma"], ignore_eos=True)
        reader.script[job.id] = list(ids)
        result = await job.result(LIVENESS_S)
    assert result.text == "alpha "
    assert result.finish_reason == "stop"
    assert tokenizer.decode(result.token_ids).startswith("alpha beta gamma")
    assert result.usage["completion_tokens"] == len(result.token_ids)


async def test_an_end_token_is_counted_and_logged_but_not_spelled(
    start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer
) -> None:
    (end,) = tokenizer.eos_token_ids
    word = tokenizer.encode_prompt("yes")
    reader = ScriptedModel(ByJob())
    async with start_worker(reader):
        job = await client.enqueue([1], max_tokens=60)
        reader.script[job.id] = [*word, end]
        result = await job.result(LIVENESS_S)
    assert (result.text, result.finish_reason) == ("yes", "stop")
    assert result.token_ids == (*word, end)


async def test_logprobs_stand_beside_their_tokens(start_worker: StartWorker, client: AsyncClient) -> None:
    async with start_worker():
        job = await client.enqueue([1, 2], max_tokens=5, ignore_eos=True, logprobs=0)
        events = [event async for event in job.stream() if event.type == "tokens"]
    for event in events:
        assert event.logprobs is not None
        assert [entry["token_id"] for entry in event.logprobs] == list(event.token_ids)
        assert [entry["logprob"] for entry in event.logprobs] == [-float(token) for token in event.token_ids]


async def test_a_row_that_cannot_be_sampled_fails_its_own_job_alone(
    start_worker: StartWorker, client: AsyncClient
) -> None:
    """B21."""
    model = HashModel(fails_at=ByJob())
    async with start_worker(model):
        good = [await client.enqueue([n], max_tokens=9, ignore_eos=True) for n in (1, 2, 3)]
        bad = await client.enqueue([4], max_tokens=9, ignore_eos=True)
        model.fails_at[SequenceId(bad.id)] = 0
        for n, job in enumerate(good, 1):
            assert (await job.result(LIVENESS_S)).token_ids == expected([n], 9)
        with pytest.raises(JobFailed) as caught:
            await bad.result(LIVENESS_S)
    assert caught.value.code == "nan_logits"


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        (b"\x82\xa2\xff", "undecodable", "not JSON"),
        (b'["a", "list"]', "undecodable", "not a JSON object"),
        (b'{"v": 99, "prompt": "x"}', "undecodable", "99"),
        (b'{"v": 1, "prompt": [1, 99999]}', "invalid_value", "99999"),
        (b'{"v": 1, "prompt": [1], "sampling": {"stop_token_ids": [5000]}}', "invalid_value", "5000"),
        (b'{"v": 1, "prompt": [1], "sampling": {"temperature": -1}}', "invalid_value", "sampling.temperature"),
        (b'{"v": 1, "prompt": [1], "sampling": {"top_p": 0}}', "invalid_value", "sampling.top_p"),
        (b'{"v": 1, "messages": [{"role": "user", "content": 7}]}', "invalid_value", "messages.0.content"),
        (b'{"v": 1}', "invalid_value", "prompt and messages"),
        (
            orjson.dumps({"v": 1, "prompt": [1] * 600}),
            "context_length_exceeded",
            "600",
        ),
    ],
)
async def test_what_a_stranger_wrote_to_redis_is_refused_by_name_and_its_neighbours_do_not_notice(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, body: bytes, code: str, words: str
) -> None:
    """B22, B54: the worker checks again, because anyone may write to Redis."""
    queue = Queue(redis, queue_name)
    stranger = new_job_id(queue_name)
    async with start_worker():
        before = await client.enqueue([7], max_tokens=8, ignore_eos=True)
        await queue.enqueue(Entry(stranger, body, "digest"))
        after = await client.enqueue([8], max_tokens=8, ignore_eos=True)
        with pytest.raises(JobFailed) as caught:
            await client.job(stranger).result(LIVENESS_S)
        assert (await before.result(LIVENESS_S)).token_ids == expected([7], 8)
        assert (await after.result(LIVENESS_S)).token_ids == expected([8], 8)
    assert caught.value.code == code
    assert words in str(caught.value.error["message"])
    dead = [entry.id for entry in await queue.dead()]
    assert (stranger in dead) == (code == "undecodable")


async def test_a_cancelled_job_leaves_the_batch_and_frees_its_seat(
    start_worker: StartWorker, client: AsyncClient
) -> None:
    async with start_worker(engine={"max_num_seqs": 1}):
        endless = await client.enqueue([1], max_tokens=400, ignore_eos=True)
        async for event in endless.stream():
            if event.type == "tokens":
                break
        await endless.cancel()
        following = await client.enqueue([2], max_tokens=5, ignore_eos=True)
        assert (await following.result(LIVENESS_S)).token_ids == expected([2], 5)
        last = [event async for event in endless.stream()][-1]
    assert last.type == "cancelled"


async def test_the_next_owner_goes_on_where_the_log_ends(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """A worker that took the job, said three tokens and gave it back; ours says the rest, from the log alone."""
    queue = Queue(redis, queue_name)
    prompt, answer = [3, 4], expected([3, 4], 12)
    job = await client.enqueue(prompt, max_tokens=12, ignore_eos=True)
    claimed = await queue.claim("other", "n1", credit=1, fingerprint="hash.1", lease_s=60)
    (delivery,) = claimed.deliveries
    events = [
        Event("started", 1, attempt=1, prompt_tokens=2, cached_tokens=0),
        Event("tokens", 2, index=0, token_ids=answer[:2], text=""),
        Event("tokens", 3, index=2, token_ids=answer[2:3], text=""),
    ]
    refused = await queue.append(
        [
            Append(
                delivery.id,
                delivery.fence,
                1,
                3,
                [event.encode() for event in events],
                prompt_ids=pack_ids(prompt),
                num_prompt_tokens=2,
            )
        ]
    )
    assert refused == []
    await queue.release(delivery.id, delivery.fence)
    async with start_worker():
        events = [event async for event in job.stream()]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert tuple(token for event in events for token in event.token_ids) == answer
    resumed = [event for event in events if event.type == "started"][1]
    assert (resumed.attempt, resumed.resumed_tokens) == (1, 3)
    assert events[-1].usage == {"prompt_tokens": 2, "completion_tokens": 12, "cached_tokens": 0}


async def test_a_text_prompt_and_a_chat_are_tokenised_by_the_worker(
    start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer
) -> None:
    text, chat = "Once upon a time", [{"role": "user", "content": "hi"}]
    async with start_worker():
        said = await client.generate(text, max_tokens=3, ignore_eos=True)
        chatted = await client.generate(messages=chat, max_tokens=3, ignore_eos=True)
    assert said.token_ids == expected(tokenizer.encode_prompt(text), 3)
    assert chatted.token_ids == expected(tokenizer.encode_chat(chat), 3)


async def test_after_the_drain_no_key_but_results_and_the_ledger_is_left(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str
) -> None:
    """B38."""
    async with start_worker():
        for job in [await client.enqueue([n + 1], max_tokens=3, ignore_eos=True) for n in range(30)]:
            await job.result(LIVENESS_S)
    keys = Keys(queue_name)
    left = {key.decode().removeprefix(keys.prefix) async for key in redis.scan_iter(match=f"{keys.prefix}:*")}
    of_jobs = {key for key in left if key.startswith((":job:", ":tokens:"))}
    assert len(of_jobs) == 60
    of_the_queue = {":counts", ":usage", ":ended", ":vt", ":epoch", ":fps", ":last:w1", ":idle:interactive"}
    of_the_janitor = {":sweep", ":looked"}  # one each, and they expire
    assert left - of_jobs <= of_the_queue | of_the_janitor
    assert await Queue(redis, queue_name).counts() == (0, 0)


async def test_asking_for_a_queue_that_does_not_exist_names_those_that_do(
    redis_url: str, start_worker: StartWorker
) -> None:
    async with AsyncClient(redis_url, queue="nobody-serves-this") as client:
        with pytest.raises(InvalidJob, match="known: "):
            await client.enqueue("hello")
