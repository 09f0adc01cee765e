"""The same log or another one: what a reader can tell from the bytes it read last and from where each choice stands."""

from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from jitney.messages import Event, usage_of
from jitney.position import Message, Position, parse


def message(event: Event) -> Message:
    return Message(event, event.encode())


def said(seq: int, index: int, *token_ids: int, choice: int = 0) -> Message:
    return message(Event("tokens", seq, choice=choice, index=index, token_ids=token_ids, text="w" * len(token_ids)))


@st.composite
def logs(draw: st.DrawFn) -> list[Message]:
    """A whole log: up to three choices, events of no to four tokens, claims in between, and an end."""
    next_index = {0: 0, 1: 0, 2: 0}
    events = [Event("started", 1, attempt=1, prompt_tokens=3, cached_tokens=0)]
    for choice, num_tokens in draw(st.lists(st.tuples(st.integers(-1, 2), st.integers(0, 4)), max_size=12)):
        seq = len(events) + 1
        if choice < 0:
            events.append(Event("started", seq, attempt=2, resumed_tokens=sum(next_index.values())))
            continue
        index = next_index[choice]
        token_ids = tuple(100 * choice + index + n for n in range(num_tokens))
        events.append(Event("tokens", seq, choice=choice, index=index, token_ids=token_ids, text="w" * num_tokens))
        next_index[choice] += num_tokens
    events.append(Event("finished", len(events) + 1, usage=usage_of(3, sum(next_index.values()))))
    return [message(event) for event in events]


@given(logs(), st.data())
def test_however_a_log_arrives_each_event_is_taken_once(log: list[Message], data: st.DataObject) -> None:
    """Pieces from anywhere at or before the cursor, of any length, from the log (inclusive) or the channel."""
    cursor = data.draw(st.integers(0, len(log) - 1))
    position, taken = Position(cursor), []
    pieces = st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 4))
    for is_of_log, back, length in [*data.draw(st.lists(pieces, max_size=6)), (True, 1, len(log) + 1)]:
        start = max(0, position.cursor - (1 if is_of_log else back))
        page = log[start : start + length]
        assert not is_of_log or position.recognise(page) is None
        step = position.take(page)
        assert step.objection is None
        taken += step.taken
    assert taken == log[cursor:]


@given(logs(), st.data())
def test_a_log_with_other_bytes_at_the_cursor_is_another_log(log: list[Message], data: st.DataObject) -> None:
    cursor = data.draw(st.integers(1, len(log)))
    position = Position()
    position.take(log[:cursor])
    other = dataclasses.replace(log[cursor - 1].event, text="other", attempt=9, error={"code": "other"})
    objection = position.recognise([message(other), *log[cursor:]])
    assert objection == f"has another event {cursor} than the one that was read"


@given(logs(), st.data())
def test_what_was_cut_into_other_events_is_noticed_before_a_token_comes_twice_or_never(
    log: list[Message], data: st.DataObject
) -> None:
    """The tokens of one choice shifted by some, from one event on: the first event of it that comes is refused."""
    at = data.draw(st.integers(1, len(log) - 1))
    shift = data.draw(st.integers(-3, 3).filter(bool))
    position = Position()
    position.take(log[:at])
    shifted = [
        message(dataclasses.replace(one.event, index=one.event.index + shift)) if one.event.type == "tokens" else one
        for one in log[at:]
    ]
    step = position.take(shifted)
    told = [one.event for one in log[at:]]
    first = next((n for n, event in enumerate(told) if event.type == "tokens"), None)
    if first is None:
        assert step.objection is None
    else:
        index, choice = told[first].index, told[first].choice
        goes_on = f"goes on with token {index + shift} of choice {choice} after {index} of them were read"
        assert (step.taken, step.objection) == (log[at : at + first], goes_on)


def test_a_reader_that_begins_in_the_middle_learns_each_choice_from_its_first_event() -> None:
    position = Position(5)
    assert position.recognise([said(5, 7, 1)]) is None
    assert position.take([said(6, 8, 2), said(7, 3, 9, choice=1)]).objection is None
    assert position.take([said(8, 3, 9, choice=1)]).objection == (
        "goes on with token 3 of choice 1 after 4 of them were read"
    )
    assert position.cursor == 7


def test_the_event_at_a_given_cursor_tells_where_its_choice_stands() -> None:
    position = Position(5)
    assert position.recognise([said(5, 7, 1)]) is None
    assert position.take([said(6, 7, 1)]).objection == "goes on with token 7 of choice 0 after 8 of them were read"


def test_the_event_at_a_given_cursor_is_remembered_from_then_on() -> None:
    position = Position(5)
    assert position.recognise([said(5, 7, 1)]) is None
    assert position.recognise([said(5, 7, 2)]) == "has another event 5 than the one that was read"


def test_a_page_without_the_cursors_event_is_of_another_log() -> None:
    position = Position(5)
    assert position.recognise([said(6, 7, 1)]) == "no longer has event 5, which was read"
    assert position.cursor == 5


def test_nothing_is_taken_beyond_a_hole() -> None:
    position = Position()
    step = position.take([said(1, 0, 1), said(3, 2, 3)])
    assert (step.taken, step.objection) == ([said(1, 0, 1)], "has a hole after event 1")


def test_nothing_is_taken_after_the_end() -> None:
    end = message(Event("finished", 2))
    assert Position().take([said(1, 0, 1), end, said(3, 1, 2)]).taken == [said(1, 0, 1), end]


def test_what_is_no_event_is_no_message() -> None:
    words = (b"", b"\xff", b"[]", b"{}", b'{"type":"tokens","seq":"1"}', b'{"type":"tokens","seq":true}')
    assert [parse(word) for word in words] == [None] * len(words)


def test_the_event_at_the_cursor_may_come_again_and_no_other() -> None:
    position = Position()
    position.take([said(1, 0, 1), said(2, 1, 2)])
    assert position.take([said(1, 0, 9), said(2, 1, 2), said(3, 2, 3)]).taken == [said(3, 2, 3)]
    assert position.take([said(3, 2, 4), said(4, 3, 5)]).objection == "has another event 3 than the one that was read"
    assert position.cursor == 3
