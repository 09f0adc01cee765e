"""B28, B30, B31: what is said, character for character, through the real worker and engine.

The model says what the test wrote.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.cases.kinds import BYTES, FAMILY, byte_ids, with_tokenizer
from tests.engine.scripted_model import ScriptedModel
from tests.runtime.harness import LIVENESS_S, ByJob, StartWorker, Turnstile

from jitney import AsyncClient, AsyncJob
from jitney.connection import Redis
from jitney.keys import JobId
from jitney.messages import Event
from jitney.queue import Append, Delivery, Queue, pack_ids
from jitney_worker.engine.protocol import RowFailure
from jitney_worker.text.spelling import Speller, TextOptions
from jitney_worker.text.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(request: pytest.FixtureRequest, tokenizer_directories: dict[str, Path]) -> Tokenizer:
    """The worker's: `@with_tokenizer("metaspace")` chooses it."""
    return Tokenizer.load(tokenizer_directories[getattr(request, "param", "byte-level")])


@dataclass
class Told:
    """What a client was given: events, and the answer in one piece."""

    deltas: list[str]
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


@dataclass
class Stage:
    """A client, and a model that says what it is told to."""

    client: AsyncClient
    scripts: ByJob[Any]
    prompt: list[int] = field(default_factory=lambda: [5])

    async def say(self, ids: list[Any], **options: Any) -> Told:
        job = await self.client.enqueue(self.prompt, **{"max_tokens": len(ids), "ignore_eos": True, **options})
        self.scripts[job.id] = ids
        events = [event async for event in job.stream()]
        result = await job.result(LIVENESS_S)
        deltas = [event.text for event in events if event.type == "tokens"]
        return Told(deltas, result.text, tuple(result.token_ids), result.finish_reason)


# Characters over several tokens


@with_tokenizer(*BYTES)
async def test_a_character_over_several_tokens_is_shown_whole_and_the_stream_is_the_answer(
    start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer
) -> None:
    """B28: emoji, families, flags, jamo, accents and what is written from right to left, byte by byte."""
    stage = Stage(client, ByJob())
    async with start_worker(ScriptedModel(stage.scripts)):
        for text in ("😀", FAMILY, "🇫🇷", "\u1112\u1161\u11ab", "cafe\u0301", "שלום \u200fעולם", "x\ufffdy"):
            ids = byte_ids(tokenizer, text)
            told = await stage.say(ids)
            assert "".join(told.deltas) == told.text == tokenizer.decode(ids) == text
            assert all(("\ufffd" in delta) <= ("\ufffd" in text) for delta in told.deltas)
            assert told.token_ids == tuple(ids)


@with_tokenizer(*BYTES)
@pytest.mark.parametrize("bad", [b"\xff", b"\xf0", b"\xf0\x9f\x98", b"\xed\xa0\x80"])
async def test_invalid_bytes_do_not_hold_the_stream(
    start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer, bad: bytes
) -> None:
    """B28: after every token all is out but what may still become a character."""
    scripts: ByJob[Any] = ByJob()
    turnstile, ids, text = Turnstile(ScriptedModel(scripts)), byte_ids(tokenizer, b"a" + bad * 12 + b"b"), ""
    async with start_worker(turnstile):
        job = await client.enqueue([5], max_tokens=len(ids), ignore_eos=True)
        scripts[job.id] = ids
        stream = job.stream()
        for count in range(1, len(ids) + 1):
            await turnstile.until_step()
            turnstile.pass_one()
            async for event in stream:
                text += event.text
                if event.index + len(event.token_ids) >= count:
                    break
            kept = tokenizer.decode(ids[:count]).removeprefix(text)
            assert kept in ("", "\ufffd", "\ufffd" * 2, "\ufffd" * 3)
        turnstile.open()
        assert (await job.result(LIVENESS_S)).text == text == tokenizer.decode(ids)
    assert text.endswith("\ufffdb")


HELD = b"ab\xf0\x9f"
"""What a stop string "abc" holds back, and half of a character."""


@with_tokenizer("byte-level")
@pytest.mark.parametrize(
    ("ending", "rest", "text"),
    [
        ("length", [], "ab\ufffd"),
        ("stop token", ["q"], "ab\ufffd"),
        ("expired", [], "ab\ufffd"),
        ("failed", [RowFailure("nan_logits", "not a number")], "ab\ufffd"),
        ("cancelled", [], ""),
    ],
)
async def test_what_was_held_back_is_given_out_once_at_every_ending_but_a_cancel(
    start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer, ending: str, rest: list[Any], text: str
) -> None:
    """B28: who cancels wants no more; who waits gets all there is, an unfinished character as U+FFFD."""
    scripts: ByJob[Any] = ByJob()
    turnstile = Turnstile(ScriptedModel(scripts))
    (stop_token,) = byte_ids(tokenizer, "q")
    said = [*byte_ids(tokenizer, HELD), *(stop_token if one == "q" else one for one in rest)]
    options: dict[str, Any] = {"max_tokens": len(said) if ending == "length" else 100, "stop": ["abc"]}
    if ending == "expired":
        options["timeout_s"] = 1.0
    async with start_worker(turnstile):
        job = await client.enqueue([5], ignore_eos=True, stop_token_ids=[stop_token], **options)
        scripts[job.id] = said
        for _ in said:
            await turnstile.until_step()
            turnstile.pass_one()
        if ending == "cancelled":
            await logged(job, len(said))
            await job.cancel()
        events = [event async for event in job.stream()]
        turnstile.open()
    assert "".join(event.text for event in events) == text
    assert events[-1].type == (ending if ending in ("expired", "failed", "cancelled") else "finished")
    assert len(ids_of(events)) == len(said) - (ending == "failed")


@with_tokenizer(*BYTES)
async def test_what_was_held_back_when_a_worker_went_is_neither_lost_nor_said_twice(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, tokenizer: Tokenizer
) -> None:
    """B28: a hand-over after every single token: within characters, and within the beginnings of stop strings."""
    queue, scripts = Queue(redis, queue_name), ByJob[Any]()
    ids = byte_ids(tokenizer, "ab😀 abd \u1112\u1161 abc")
    jobs = [await client.enqueue([5], max_tokens=100, ignore_eos=True, stop=["abc"]) for _ in ids[1:]]
    claimed = await queue.claim("other", "n1", credit=len(jobs), fingerprint="hash.1", lease_s=60)
    for cut, delivery in enumerate(claimed.deliveries, start=1):
        scripts[delivery.id] = ids
        await say_and_go(queue, delivery, Speller(tokenizer, ["abc"]), ids[:cut], [5])
    assert len(scripts) == len(jobs)
    async with start_worker(ScriptedModel(scripts)):
        for job in jobs:
            events = [event async for event in job.stream()]
            result = await job.result(LIVENESS_S)
            assert len([event for event in events if event.type == "started"]) == 2
            assert "".join(event.text for event in events) == result.text == "ab😀 abd \u1112\u1161 "
            assert (ids_of(events), result.finish_reason) == (tuple(ids), "stop")


async def say_and_go(queue: Queue, delivery: Delivery, speller: Speller, ids: list[int], prompt: list[int]) -> None:
    """Say these tokens of a job as a worker does, and hand it back."""
    text = speller.replay(ids)
    events = [
        Event("started", 1, attempt=1, prompt_tokens=1, cached_tokens=0),
        Event("tokens", 2, index=0, token_ids=tuple(ids), text=text),
    ]
    encoded = [event.encode() for event in events]
    append = Append(
        delivery.id,
        delivery.fence,
        1,
        len(ids),
        encoded,
        prompt_ids=pack_ids(prompt),
        num_prompt_tokens=len(prompt),
    )
    assert await queue.append([append]) == []
    await queue.release(delivery.id, delivery.fence)


async def logged(job: AsyncJob, num_tokens: int) -> None:
    """Until the log holds so many tokens."""
    async for event in job.stream():
        if event.index + len(event.token_ids) >= num_tokens:
            return


def ids_of(events: list[Event]) -> tuple[int, ...]:
    return tuple(token_id for event in events for token_id in event.token_ids)


# Spaces at the start


@with_tokenizer("metaspace by hand", "metaspace by hand, all spaces kept")
async def test_words_of_a_metaspace_vocabulary_keep_the_spaces_between_them(
    start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer
) -> None:
    """B30: a lone ▁, and words with one, at the start of an answer and within it; behind a prompt none is dropped."""
    stage = Stage(client, ByJob(), prompt=[4])
    spoken = {token: number for number in range(tokenizer.vocab_size) if (token := tokenizer.pieces.token(number))}
    prompt = tokenizer.decode(stage.prompt)
    async with start_worker(ScriptedModel(stage.scripts)):
        for words, text in ((["▁", "▁leading", "▁x"], "  leading x"), (["▁x", "▁x"], " x x")):
            ids = [spoken[word] for word in words]
            told = await stage.say(ids)
            assert "".join(told.deltas) == told.text == text
            assert prompt + text == tokenizer.decode([*stage.prompt, *ids])
            echoed = await stage.say(ids, echo=True)
            assert "".join(echoed.deltas) == echoed.text == prompt + text
            stopped = await stage.say(ids, stop=[" x"])
            assert stopped.text == text[: text.index(" x")]


@with_tokenizer("metaspace")
async def test_the_first_space_is_kept_behind_a_prompt_and_dropped_in_a_chat_also_by_a_later_owner(
    start_worker: StartWorker, client: AsyncClient, redis: Redis, queue_name: str, tokenizer: Tokenizer
) -> None:
    """B30: what is said in a chat is a text of its own; the answer to a prompt goes on with the prompt."""
    queue, scripts = Queue(redis, queue_name), ByJob[Any]()
    ids, texts = tokenizer.encode_part("the sea", "text"), dict[str, str]()
    chat: list[dict[str, Any]] = [{"role": "user", "content": "by"}]
    by, in_chat = tokenizer.encode_prompt("by"), tokenizer.encode_chat(chat)
    for _ in ids:
        for asked, text in (({"prompt": "by"}, " the sea"), ({"messages": chat}, "the sea")):
            job = await client.enqueue(max_tokens=len(ids), ignore_eos=True, **asked)  # type: ignore[arg-type]
            scripts[job.id], texts[job.id] = ids, text
    claimed = await queue.claim("other", "n1", credit=len(texts), fingerprint="hash.1", lease_s=60)
    for number, delivery in enumerate(claimed.deliveries):
        follows = by if texts[delivery.id].startswith(" ") else []
        speller = Speller(tokenizer, options=TextOptions(follows=tuple(follows)))
        if number < 2:  # nobody has begun with it
            await queue.release(delivery.id, delivery.fence)
        else:
            await say_and_go(queue, delivery, speller, ids[: number // 2], by if follows else in_chat)
    async with start_worker(ScriptedModel(scripts)):
        for job_id, text in texts.items():
            result = await client.job(JobId(job_id)).result(LIVENESS_S)
            assert (result.text, result.token_ids) == (text, tuple(ids))


@with_tokenizer("byte-level")
async def test_an_answers_first_space_and_first_line_end_are_its_own(
    start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer
) -> None:
    """B30: also where the prompt ends in a space."""
    scripts: ByJob[Any] = ByJob()
    async with start_worker(ScriptedModel(scripts)):
        for prompt in ("x", "x ", " "):
            for text in (" the sea", "\n\n the", "  ", "the"):
                ids = tokenizer.encode_part(text, "text")
                job = await client.enqueue(prompt, max_tokens=len(ids), ignore_eos=True)
                scripts[job.id] = ids
                assert (await job.result(LIVENESS_S)).text == text


# Stop strings

STOPS: dict[str, tuple[list[str], str | bytes, str, str]] = {
    "over tokens": (["beta gamma"], "alpha beta gamma delta", "alpha ", "stop"),
    "never matched": (["#" * 40], "a # b ### c", "a # b ### c", "length"),
    "overlapping": (["ab", "abc"], "xabcd", "x", "stop"),
    "complete together": (["bcd", "abcd"], "xabcd", "x", "stop"),
    "beside an emoji": (["👍"], "a😀👍😀", "a😀", "stop"),
    "an emoji of the same first bytes": (["😀"], "a😁😂😀", "a😁😂", "stop"),
    "a family, behind a smaller one": ([FAMILY], f"the 👨‍👩‍👧 and {FAMILY}!", "the 👨‍👩‍👧 and ", "stop"),
    "within a family": (["\u200d👧"], FAMILY, "👨‍👩", "stop"),
    "a joiner": (["\u200d"], FAMILY, "👨", "stop"),
    "a skin tone": (["🏽"], "ok 👍🏽", "ok 👍", "stop"),
    "half of a flag": (["🇷"], "🇫🇷!", "🇫", "stop"),
    "an accent": (["e\u0301"], "café cafe\u0301", "café caf", "stop"),
    "a jamo": (["\u1161"], "\u1112\u1161\u11ab", "\u1112", "stop"),
    "exactly at the limit": (["def"], "abcdef", "abc", "stop"),
    "begun at the limit": (["def"], "abcde", "abcde", "length"),
    "in what the end makes of half a character": (["\ufffd"], b"ab\xf0", "ab\ufffd", "length"),
    "behind a bad byte": (["\ufffdb"], b"a\xffbc", "a", "stop"),
}


@with_tokenizer(*BYTES)
async def test_nothing_of_a_stop_string_reaches_the_client_and_nothing_else_is_missing(
    start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer
) -> None:
    """B31: byte by byte; tokens count up to the one that completes it."""
    stage = Stage(client, ByJob())
    async with start_worker(ScriptedModel(stage.scripts)):
        for name, (stop, said, shown, reason) in STOPS.items():
            told = await stage.say(byte_ids(tokenizer, said), stop=stop)
            assert ("".join(told.deltas), told.text, told.finish_reason) == (shown, shown, reason), name
            before = tokenizer.decode(told.token_ids[:-1])
            assert reason == "length" or not any(string in before for string in stop), name


@with_tokenizer("byte-level")
async def test_a_stop_string_that_stands_in_the_prompt_stops_nothing(
    start_worker: StartWorker, client: AsyncClient, tokenizer: Tokenizer
) -> None:
    """B31: neither the whole of it nor its first half."""
    scripts: ByJob[Any] = ByJob()
    async with start_worker(ScriptedModel(scripts)):
        for prompt, text in (("tell me END", " of it"), ("tell me EN", "D of it")):
            ids = byte_ids(tokenizer, text)
            job = await client.enqueue(prompt, max_tokens=len(ids), ignore_eos=True, stop=["END"])
            scripts[job.id] = ids
            result = await job.result(LIVENESS_S)
            assert (result.text, result.finish_reason) == (text, "length")
