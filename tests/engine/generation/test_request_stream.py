"""RequestStream alone: token by token, without an engine."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from engine.errors import EngineFailure
from engine.generation.request_stream import RequestStream
from engine.requests.events import (
    Admitted,
    FinishReason,
    PositionLogprobs,
    RequestFinished,
    SequenceFinished,
    TextDelta,
    Timing,
    TokenLogprob,
)
from engine.requests.request import Deltas, SamplingParams
from engine.scheduling.output import (
    AdmittedOutput,
    CutOutput,
    FailedOutput,
    FinishedOutput,
    TokensOutput,
)
from engine.scheduling.sequence import TokenRequest
from engine.text.tokenizer import Tokenizer

EOS = 257
TIMING = Timing(0.1, 0.2, 0.3, 0.3, 4, 1.0)


class Watched:
    """A stream, and what the engine tells it."""

    def __init__(self, tokenizer: Tokenizer, **params) -> None:
        self.sums: Counter[int] = Counter()
        deltas = params.pop("deltas", Deltas())
        asked = TokenRequest(0, "r-1", (1, 2, 3), SamplingParams(**params), 5, 0.0, deltas=deltas)
        self.stream = RequestStream(asked, tokenizer)

    def give(self, text: str | bytes, index: int = 0, **told) -> None:
        for token_id in text.encode() if isinstance(text, str) else text:
            self.sums[index] -= 0.25
            self.stream.take(TokensOutput(0, index, [token_id], self.sums[index], **told))

    def end(
        self, token_id: int = EOS, reason=FinishReason.EOS, stop: int | str | None = None
    ) -> None:
        self.sums[0] -= 0.25
        self.stream.take(TokensOutput(0, 0, [token_id], self.sums[0], reason, stop))


@pytest.fixture
def watched(byte_tokenizer: Tokenizer) -> Watched:
    return Watched(byte_tokenizer)


async def test_each_reading_gives_what_is_new(watched: Watched) -> None:
    watched.stream.take(AdmittedOutput(0))
    first = await watched.stream.events()
    watched.give("ab")
    second = await watched.stream.events()
    watched.give("c")
    third = await watched.stream.events()

    assert first == [Admitted("r-1", 3)]
    assert second == [TextDelta(0, "ab", (97, 98))]
    assert third == [TextDelta(0, "c", (99,))]


async def test_the_last_delta_brings_the_tokens_that_have_no_text(watched: Watched) -> None:
    watched.give("a")
    await watched.stream.events()
    watched.end()
    watched.stream.take(FinishedOutput(0, TIMING))

    events = await watched.stream.events()

    assert events[0] == TextDelta(0, "", (EOS,))
    assert events[1] == SequenceFinished(0, FinishReason.EOS, "a", (97, EOS), None, -0.5)
    assert isinstance(events[2], RequestFinished)
    assert (events[2].usage.input_tokens, events[2].usage.output_tokens) == (3, 2)
    assert watched.stream.is_read and events[2].seed == 5


async def test_tokens_wait_for_the_character_that_they_begin(watched: Watched) -> None:
    watched.give("é"[:1])
    await watched.stream.events()
    watched.give("日".encode()[:2])

    waiting = await watched.stream.events()
    watched.give("日".encode()[2:])
    whole = await watched.stream.events()

    assert waiting == []
    assert whole == [TextDelta(0, "日", tuple("日".encode()))]


async def test_a_reader_waits_while_nothing_is_new(watched: Watched) -> None:
    watched.give("a")
    await watched.stream.events()

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(watched.stream.events(), 0.01)


async def test_an_error_is_raised_behind_the_text_that_came_before_it(watched: Watched) -> None:
    watched.give("half")
    watched.stream.take(FailedOutput(0, EngineFailure("r-1 failed")))

    events = await watched.stream.events()

    assert events == [TextDelta(0, "half", tuple(b"half"))]
    with pytest.raises(EngineFailure, match="r-1 failed"):
        await watched.stream.events()


async def test_what_waited_for_more_text_comes_before_the_error_too(
    byte_tokenizer: Tokenizer,
) -> None:
    watched = Watched(byte_tokenizer, stop_strings=("xyz",))
    watched.give("axy")
    first = await watched.stream.events()
    watched.stream.take(FailedOutput(0, EngineFailure("r-1 failed")))

    events = await watched.stream.events()

    assert first == [TextDelta(0, "a", tuple(b"axy"))]
    assert events == [TextDelta(0, "xy", ())]
    with pytest.raises(EngineFailure, match="r-1 failed"):
        await watched.stream.events()


async def test_a_request_that_fails_before_its_first_token_sends_no_text(
    byte_tokenizer: Tokenizer,
) -> None:
    given = tuple(b"given")
    source = TokenRequest(0, "r-1", (1, 2, 3), SamplingParams(), 0, 0.0, target_ids=given)
    stream = RequestStream(source, byte_tokenizer)
    stream.take(FailedOutput(0, EngineFailure("r-1 failed")))

    with pytest.raises(EngineFailure, match="r-1 failed"):
        await stream.events()


async def test_a_request_that_has_ended_stays_as_it_ended(watched: Watched) -> None:
    watched.end()
    read = await watched.stream.events()

    watched.stream.take(FinishedOutput(0, TIMING))
    watched.stream.take(FailedOutput(0, EngineFailure("too late")))

    assert isinstance(read[-1], SequenceFinished)
    assert isinstance((await watched.stream.events())[-1], RequestFinished)


async def test_a_stop_string_is_not_in_the_text(byte_tokenizer: Tokenizer) -> None:
    watched = Watched(byte_tokenizer, stop_strings=("STOP",))
    watched.give("go STO")
    first = await watched.stream.events()
    watched.end(ord("P"), FinishReason.STOP, "STOP")

    delta, end = await watched.stream.events()

    assert first == [TextDelta(0, "go ", tuple(b"go STO"))]
    assert (delta.text, end.text, end.token_ids) == ("", "go ", tuple(b"go STOP"))
    assert (end.reason, end.matched_stop) == (FinishReason.STOP, "STOP")


async def test_a_stop_string_completed_by_the_last_token_is_a_stop(
    byte_tokenizer: Tokenizer,
) -> None:
    watched = Watched(byte_tokenizer, stop_strings=("ab",))
    watched.give("a")
    watched.end(ord("b"), FinishReason.LENGTH)

    _, end = await watched.stream.events()

    assert (end.reason, end.matched_stop, end.text) == (FinishReason.STOP, "ab", "")


async def test_held_back_text_is_sent_when_the_sequence_ends_otherwise(
    byte_tokenizer: Tokenizer,
) -> None:
    watched = Watched(byte_tokenizer, stop_strings=("abc",))
    watched.give("xab")
    before = await watched.stream.events()
    watched.end()
    after = await watched.stream.events()

    assert before == [TextDelta(0, "x", tuple(b"xab"))]
    assert after[0] == TextDelta(0, "ab", (EOS,))


async def test_sequences_have_texts_of_their_own(byte_tokenizer: Tokenizer) -> None:
    watched = Watched(byte_tokenizer, strategy="sampling", num_outputs=2)
    watched.give("a", index=0)
    watched.give("b", index=1)
    watched.give("c", index=0)

    assert await watched.stream.events() == [
        TextDelta(0, "ac", (97, 99)),
        TextDelta(1, "b", (98,)),
    ]


async def test_a_sequence_that_is_cut_gives_out_what_was_held_back(
    byte_tokenizer: Tokenizer,
) -> None:
    watched = Watched(byte_tokenizer, stop_strings=("ab!",))
    watched.give("xab")
    watched.stream.take(CutOutput(0, 0, FinishReason.DEADLINE))
    watched.stream.take(FinishedOutput(0, TIMING))

    events = await watched.stream.events()

    assert events[:2] == [
        TextDelta(0, "xab", tuple(b"xab")),
        SequenceFinished(0, FinishReason.DEADLINE, "xab", tuple(b"xab"), None, -0.75),
    ]


async def test_tokens_are_gathered_by_sequence_and_the_rest_comes_before_the_end(
    byte_tokenizer: Tokenizer,
) -> None:
    watched = Watched(byte_tokenizer, deltas=Deltas(2), strategy="sampling", num_outputs=2)
    watched.give("a")
    watched.give("x", index=1)
    watched.give("b")
    first = await watched.stream.events()
    watched.give("c")
    watched.end()
    second = await watched.stream.events()

    assert first == [TextDelta(0, "ab", (97, 98))]
    assert second == [
        TextDelta(0, "c", (99, EOS)),
        SequenceFinished(0, FinishReason.EOS, "abc", (97, 98, 99, EOS), None, -1.0),
    ]


async def test_log_probabilities_are_gathered_with_their_tokens(byte_tokenizer: Tokenizer) -> None:
    watched = Watched(byte_tokenizer, deltas=Deltas(2), logprobs=0)
    found = [PositionLogprobs(TokenLogprob(token_id, -0.25, 1)) for token_id in b"ab"]
    watched.give("a", positions=found[:1])
    watched.give("b", positions=found[1:])

    assert await watched.stream.events() == [TextDelta(0, "ab", (97, 98), tuple(found))]


async def test_tokens_too_few_for_a_delta_come_before_the_error(byte_tokenizer: Tokenizer) -> None:
    watched = Watched(byte_tokenizer, deltas=Deltas(8))
    watched.give("ab")
    watched.stream.take(FailedOutput(0, EngineFailure("r-1 failed")))

    assert await watched.stream.events() == [TextDelta(0, "ab", (97, 98))]
    with pytest.raises(EngineFailure):
        await watched.stream.events()


async def test_without_deltas_there_are_the_ends_alone(byte_tokenizer: Tokenizer) -> None:
    watched = Watched(byte_tokenizer, deltas=None)
    watched.give("ab")
    watched.end()
    watched.stream.take(FinishedOutput(0, TIMING))

    end, last = await watched.stream.events()

    assert (end.text, end.token_ids, end.was_streamed) == ("ab", (97, 98, EOS), False)
    assert isinstance(last, RequestFinished)
