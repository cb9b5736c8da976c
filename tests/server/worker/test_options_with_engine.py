"""Every option of a generation from the client through a real worker to a real engine."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from tokenweir import AsyncClient, DeadlineExceeded, InvalidArgument

from engine.config import EngineConfig
from engine.generation.async_engine import AsyncEngine
from engine.requests.generation_defaults import GenerationDefaults
from server.config import WorkerConfig
from server.worker.worker import Worker
from tests.conftest import ScriptedRunner
from tests.fakes.clock import FakeClock
from tests.fakes.http_calls import http_of

VOCAB_SIZE, EOS = 258, 257  # the other ids are bytes, then the start
MODEL = "m"
CONFIG = EngineConfig(max_num_seqs=4)

Script = Callable[[list[int], list[int]], np.ndarray]
Serving = Callable[..., AbstractAsyncContextManager[AsyncClient]]


@pytest.fixture
def serving(scripted_engine: Callable[..., tuple[AsyncEngine, ScriptedRunner]]) -> Serving:
    """Serve a scripted model, and yield a client of it."""

    @asynccontextmanager
    async def serve(
        script: Script,
        before_step: Callable[[], None] = lambda: None,
        defaults: dict[str, Any] | None = None,
        **more: Any,
    ) -> AsyncIterator[AsyncClient]:
        given = GenerationDefaults.model_validate(defaults or {})
        engine, runner = scripted_engine(script, config=CONFIG, defaults=given, **more)
        runner.before_step = before_step
        worker = Worker({MODEL: engine}, WorkerConfig())
        address = await worker.start()
        try:
            async with AsyncClient(address, timeout=60) as client:
                yield client
        finally:
            await worker.drain(0)

    return serve


def always(**logits: float) -> Script:
    """Make a script that gives the same logits at every position: by letter, else -20."""
    row = _row(logits)
    return lambda source, tokens: row


def _row(logits: dict[str, float]) -> np.ndarray:
    row = np.full(VOCAB_SIZE, -20.0, np.float32)
    for letter, logit in logits.items():
        row[ord(letter)] = logit
    return row


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "aaaaaa"),
        ({"banned_tokens": [ord("a")]}, "bbbbbb"),
        ({"logit_bias": {ord("c"): 5.0}}, "cccccc"),
        ({"presence_penalty": 1.5}, "abcaaa"),
        ({"frequency_penalty": 1.0}, "abacba"),
        ({"no_repeat_ngram": 2}, "aabaca"),
        ({"repetition_penalty": 1.2}, "abaaaa"),
        ({"encoder_no_repeat_ngram": 1, "prompt": "xa>"}, "bbbbbb"),
        ({"banned_sequences": [[*b"aa"], [*b"abab"]]}, "abacab"),
        ({"begin_banned_tokens": [ord("a")]}, "baaaaa"),
        ({"allowed_token_ids": [*b"cb"]}, "bbbbbb"),
        ({"allowed_token_ids": [*b"cb"], "beam": 2}, "bbbbbb"),
        ({"forced_begin": [*b"zc"], "forced_end": ord("b")}, "zcaaab"),
    ],
)
async def test_controls(options: dict[str, object], text: str, serving: Serving) -> None:
    async with serving(always(a=4.0, b=3.5, c=2.8)) as client:
        prompt = str(options.pop("prompt", ">"))
        answer = await client.generate(MODEL, prompt, max_new_tokens=6, **options)

    assert answer.text == text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "bbb"),
        ({"max_new_tokens": 2}, "bb"),
        ({"banned_tokens": [ord("b")]}, "aaa"),
        ({"banned_tokens": []}, "aaa"),
        ({"without_defaults": ["banned_tokens"]}, "aaa"),
        ({"without_defaults": ["*"], "max_new_tokens": 4}, "aaaa"),
    ],
)
async def test_defaults_of_the_package_hold_unless_a_request_says_otherwise(
    options: dict[str, Any], text: str, serving: Serving
) -> None:
    defaults = {"banned_tokens": (ord("a"),), "max_new_tokens": 3, "strategy": "beam", "beam": 2}

    async with serving(always(a=4.0, b=3.5, c=2.8), defaults=defaults) as client:
        answer = await client.generate(MODEL, ">", **options)
        stream = client.stream(MODEL, ">", **options)
        pieces = [piece async for piece in stream]
        (model,) = await client.models()

    assert answer.text == "".join(pieces) == text
    is_search = "*" not in options.get("without_defaults", ())
    assert (answer.sequences[0].score != 0) == is_search
    assert model.defaults["beam"] == 2


async def test_typical_p(serving: Serving) -> None:
    others = {chr(ord("A") + i): 0.0 for i in range(26)}
    # Likelier than any other, and not typical.
    async with serving(always(a=2.0, **others)) as client:
        all_tokens = await client.generate(MODEL, ">", max_new_tokens=40, seed=1)
        typical = await client.generate(MODEL, ">", max_new_tokens=40, seed=1, typical_p=0.5)

    assert "a" in all_tokens.text
    assert "a" not in typical.text


async def test_priority_and_tenant(serving: Serving) -> None:
    async with serving(always(a=4.0)) as client:
        answer = await client.generate(MODEL, ">", max_new_tokens=1, priority=-1, tenant="team")

    assert answer.text == "a"


async def test_allow_partial(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, clock: FakeClock
) -> None:
    # The engine's deadline only: a client's own would race with the answer.
    monkeypatch.setattr("server.worker.generation.engine_deadline", lambda context: clock() + 60)

    def step() -> None:
        clock.now += 3.0

    async with serving(always(a=4.0), before_step=step, clock=clock) as client:
        answer = await client.generate(MODEL, ">", allow_partial=True)
        with pytest.raises(DeadlineExceeded):
            await client.generate(MODEL, ">")

    assert answer.finish_reason == "deadline"
    assert answer.text and set(answer.text) == {"a"}


async def test_determinism_is_what_was_asked_for(serving: Serving) -> None:
    async with serving(always(a=4.0)) as client:
        answers = [
            await client.generate(MODEL, ">", max_new_tokens=1, batch_invariant=asked)
            for asked in (None, True, False)
        ]

    assert [answer.provenance.determinism for answer in answers] == [
        "batch_invariant",
        "batch_invariant",
        "best_effort",
    ]


def by_last_token(**letters_after: dict[str, float]) -> Script:
    """Make a script whose logits depend on the last token; behind any other comes the end."""
    rows = {ord(letter): _row(logits) for letter, logits in letters_after.items()}
    end = np.full(VOCAB_SIZE, -20.0, np.float32)
    end[EOS] = 0.0
    return lambda source, tokens: rows.get(tokens[-1], end)


# "a" is the likelier beginning, but what goes on from "b" is the likelier whole.
GARDEN_PATH = by_last_token(
    s={"a": 1.0, "b": 0.8},
    a={"c": 0.0, "d": -0.1, "e": -0.2, "f": -0.3},
    b={"x": 3.0, "y": 0.0},
)


async def test_beam_search_finds_what_greedy_search_misses(serving: Serving) -> None:
    async with serving(GARDEN_PATH) as client:
        greedy = await client.generate(MODEL, "s")
        beams = (await client.generate(MODEL, "s", beam=3, num_outputs=3)).sequences
        scored = await client.score(MODEL, "s", beams[0].token_ids)

    assert greedy.text == "ac"
    assert [beam.text for beam in beams] == ["bx", "ac", "ad"]
    assert [beam.finish_reason for beam in beams] == ["eos"] * 3
    assert scored.sum_logprob == pytest.approx(beams[0].sum_logprob, abs=1e-5)
    for beam in beams:
        penalty = ((5 + len(beam.token_ids)) / 6) ** 0.6
        assert beam.score == pytest.approx(beam.sum_logprob / penalty, abs=1e-5)


async def test_a_stream_of_beam_search_gives_the_best_at_its_end(serving: Serving) -> None:
    async with serving(GARDEN_PATH) as client:
        whole = await client.generate(MODEL, "s", beam=3, length_penalty=1.0, logprobs=1)
        stream = client.stream(MODEL, "s", beam=3, length_penalty=1.0, logprobs=1)
        pieces = [piece async for piece in stream]

    assert pieces == [whole.text] == ["bx"]
    assert stream.result.sequences == whole.sequences
    assert [p.chosen.token_id for p in whole.sequences[0].logprobs] == [ord("b"), ord("x"), EOS]
    assert whole.usage.discarded_tokens > 0


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({}, ["b", "a"]),
        ({"include_stop": True}, ["bx!", "a!"]),
        ({"include_stop": True, "min_new_tokens": 3}, ["bx!", "a!!"]),
    ],
)
async def test_beams_end_at_stop_strings(
    options: dict[str, Any], texts: list[str], serving: Serving
) -> None:
    script = by_last_token(
        s={"a": 1.0, "b": 0.8},
        a={"!": 0.0, "y": -0.5},
        b={"x": 3.0},
        x={"!": 3.0},
        **{"!": {"!": 3.0}},
    )
    asked = {"beam": 2, "num_outputs": 2, "stop": ["x!", "!"], "beam_end": "limit", **options}
    async with serving(script) as client:
        answer = await client.generate(MODEL, "s", max_new_tokens=5, **asked)
        stream = client.stream(MODEL, "s", max_new_tokens=5, **(asked | {"num_outputs": 1}))
        pieces = [piece async for piece in stream]

    assert [beam.text for beam in answer.sequences] == texts
    assert [beam.finish_reason for beam in answer.sequences] == ["stop"] * 2
    assert [beam.matched_stop for beam in answer.sequences] == ["x!", "!"]
    assert pieces == texts[:1]
    assert stream.result.sequences == answer.sequences[:1]
    for beam in answer.sequences:
        penalty = ((5 + len(beam.token_ids)) / 6) ** 0.6
        assert beam.score == pytest.approx(beam.sum_logprob / penalty, abs=1e-5)


async def test_best_of_returns_the_best_of_the_samples(serving: Serving) -> None:
    options = {"seed": 5, "max_new_tokens": 4}
    async with serving(always(a=1.0, b=0.5, c=0.0)) as client:
        samples = await client.generate(MODEL, ">", num_outputs=4, **options)
        best = await client.generate(MODEL, ">", best_of=4, num_outputs=2, **options)

    ranked = sorted(samples.sequences, key=lambda sample: -sample.sum_logprob)
    assert [one.text for one in best.sequences] == [one.text for one in ranked[:2]]
    assert [one.score for one in best.sequences] == pytest.approx(
        [one.sum_logprob / 4 for one in ranked[:2]]
    )
    assert best.usage.discarded_tokens == 8


async def test_logprobs(serving: Serving) -> None:
    options = {"max_new_tokens": 3, "banned_tokens": [ord("a")], "logprobs": 2}
    async with serving(always(a=2.0, b=1.0)) as client:
        answer = await client.generate(MODEL, ">", **options)
        stream = client.stream(MODEL, ">", **options)
        assert "".join([piece async for piece in stream]) == "bbb"

    (sequence,) = answer.sequences
    a, b = np.log(np.exp([2.0, 1.0]) / np.exp([2.0, 1.0]).sum())
    assert [p.chosen.piece for p in sequence.logprobs] == [b"b"] * 3
    assert [p.chosen.logprob for p in sequence.logprobs] == pytest.approx([b] * 3, abs=1e-5)
    assert [(one.piece, one.rank) for one in sequence.logprobs[0].top] == [(b"a", 1), (b"b", 2)]
    assert sequence.logprobs[0].top[0].logprob == pytest.approx(a, abs=1e-5)
    assert sequence.sum_logprob == pytest.approx(3 * b, abs=1e-5)
    assert stream.result.sequences == answer.sequences


async def test_logprobs_of_the_prompt(serving: Serving) -> None:
    async with serving(always(a=2.0, b=1.0)) as client:
        answer = await client.generate(MODEL, "bab", max_new_tokens=1, prompt_logprobs=1)
        stream = client.stream(MODEL, "bab", max_new_tokens=1, prompt_logprobs=1)
        assert [piece async for piece in stream] == ["a"]

    assert [p.chosen.piece for p in answer.prompt_logprobs] == [b"a", b"b"]
    assert [p.chosen.rank for p in answer.prompt_logprobs] == [1, 2]
    assert [p.top[0].piece for p in answer.prompt_logprobs] == [b"a", b"a"]
    assert stream.result.prompt_logprobs == answer.prompt_logprobs


async def test_a_prompt_is_read_and_nothing_generated(serving: Serving) -> None:
    wanted = {"max_new_tokens": 0, "prompt_logprobs": 1, "prompt_token_ids": True}
    defaults = {"strategy": "beam", "beam": 2, "forced_begin": (97,)}
    async with serving(always(a=2.0, b=1.0), defaults=defaults) as client:
        longer = await client.generate(MODEL, "bab", max_new_tokens=1, prompt_logprobs=1)
        answer = await client.generate(MODEL, "bab", **wanted)
        stream = client.stream(MODEL, "bab", **wanted)
        assert [piece async for piece in stream] == []
        short = await client.generate(MODEL, "b", **wanted)

    assert answer.prompt_logprobs == longer.prompt_logprobs
    assert (answer.prompt_token_ids, answer.source_pieces) == ((98, 97, 98), (b"b", b"a", b"b"))
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("", (), "length")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (3, 0)
    assert stream.result.sequences == answer.sequences
    assert stream.result.prompt_logprobs == answer.prompt_logprobs
    assert stream.result.prompt_token_ids == answer.prompt_token_ids
    assert (short.prompt_logprobs, short.prompt_token_ids) == ((), (98,))


@pytest.mark.parametrize(
    ("prompt", "most", "kept"),
    [
        ("abcdef", 3, "def"),
        ("abcdef", 6, "abcdef"),
        ("abcdef", 2**31 - 1, "abcdef"),
        ("ab" * 50, 2**31 - 1, ("ab" * 50)[-63:]),  # as many as the model takes
        ([*b"abcdef" * 50], 4, "cdef"),
        ([256, *b"abcdef"], 2, "ef"),
        ("<s>abcdef", 1, "f"),
        ("<s>abcdef", 3, "<s>ef"),
    ],
)
async def test_of_a_longer_prompt_the_last_tokens_are_read(
    serving: Serving, prompt: str | list[int], most: int, kept: str
) -> None:
    wanted = {"max_new_tokens": 0, "prompt_token_ids": True, "truncate_prompt_tokens": most}
    async with serving(always(a=2.0)) as client:
        answer = await client.generate(MODEL, prompt, **wanted)
        with pytest.raises(InvalidArgument, match="truncate_prompt_tokens: 0 is below 1"):
            await client.generate(MODEL, prompt, **(wanted | {"truncate_prompt_tokens": 0}))

    assert b"".join(answer.source_pieces).decode() == kept
    assert answer.usage.input_tokens == len(answer.prompt_token_ids)


async def test_an_encoder_reads_no_source_for_nothing(serving: Serving) -> None:
    wanted = {"max_new_tokens": 0, "prompt_logprobs": 0, "prompt_token_ids": True}
    async with serving(always(a=2.0, b=1.0), max_source_len=16) as client:
        alone, behind = [
            await client.generate(MODEL, "source", target_prefix=prefix, **wanted)
            for prefix in (None, "by")
        ]

    assert (alone.text, alone.prompt_logprobs, alone.usage.input_tokens) == ("", (), 6)
    assert (behind.text, [p.chosen.piece for p in behind.prompt_logprobs]) == ("by", [b"b", b"y"])
    assert alone.prompt_token_ids == behind.prompt_token_ids == tuple(b"source")


async def test_an_answer_begins_with_its_target_prefix(serving: Serving) -> None:
    options = {"target_prefix": "by", "max_new_tokens": 2, "prompt_logprobs": 0}
    async with serving(always(a=2.0, b=1.0), max_source_len=16) as client:
        answer = await client.generate(MODEL, "source", **options)
        from_ids = await client.generate(
            MODEL, "source", **(options | {"target_prefix": [98, 121]})
        )
        stream = client.stream(MODEL, "source", **options)
        pieces = [piece async for piece in stream]

    assert answer.text == "".join(pieces) == from_ids.text == "byaa"
    assert answer.token_ids == stream.result.token_ids == (98, 121, 97, 97)
    assert [p.chosen.piece for p in answer.prompt_logprobs] == [b"b", b"y"]


async def test_a_decoders_answer_begins_with_its_target_prefix(serving: Serving) -> None:
    async with serving(always(a=2.0, b=1.0)) as client:
        answer = await client.generate(MODEL, ">", target_prefix="by", max_new_tokens=2)

    assert answer.text == "byaa"


async def test_a_target_may_be_longer_than_the_longest_source(serving: Serving) -> None:
    async with serving(always(a=2.0), max_source_len=8) as client:
        score = await client.score(MODEL, "source", "a" * 20)
        answer = await client.generate(MODEL, "source", target_prefix="b" * 20, max_new_tokens=1)
        with pytest.raises(InvalidArgument, match="100 tokens are more than the 62 that fit"):
            await client.score(MODEL, "source", "a" * 100)

    assert len(score.positions) == 20
    assert answer.text == "b" * 20 + "a"


@pytest.mark.parametrize("shape", [{}, {"max_source_len": 16}])
async def test_score(shape: dict[str, int], serving: Serving) -> None:
    async with serving(always(a=2.0, b=1.0), **shape) as client:
        score = await client.score(MODEL, "source", "ab", top_logprobs=2)

    a, b = np.log(np.exp([2.0, 1.0]) / np.exp([2.0, 1.0]).sum())
    assert score.sum_logprob == pytest.approx(a + b, abs=1e-5)
    assert [p.chosen.logprob for p in score.positions] == pytest.approx([a, b], abs=1e-5)
    assert [p.chosen.rank for p in score.positions] == [1, 2]
    assert [token.piece for token in score.positions[1].top] == [b"a", b"b"]


async def test_wrong_targets_are_named(serving: Serving) -> None:
    async with serving(always(a=2.0), max_source_len=16) as client:
        for target, path in (("", "inputs[0].prefix_text"), ([300], "inputs[0].prefix_tokens")):
            with pytest.raises(InvalidArgument) as caught:
                await client.score(MODEL, "source", target)
            assert [v.field.startswith(path) for v in caught.value.violations] == [True]


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "[0-9]{2}-[a-c]"}, None),
        ({"json_schema": {"type": "boolean"}}, {"true", "false"}),
        ({"grammar": 'start: "x" | "y"'}, {"x", "y"}),
    ],
)
@pytest.mark.parametrize("strategy", [{}, {"seed": 3}, {"beam": 2}])
async def test_constraints(
    options: dict[str, Any], texts: set[str] | None, strategy: dict[str, Any], serving: Serving
) -> None:
    async with serving(lambda source, tokens: np.zeros(VOCAB_SIZE, np.float32)) as client:
        answer = await client.generate(MODEL, ">", max_new_tokens=20, **options, **strategy)

    assert answer.finish_reason == "eos"
    if texts is None:
        assert re.fullmatch(options["regex"], answer.text)
    else:
        assert answer.text in texts


async def test_a_wrong_token_of_a_run_is_named_by_the_option_and_its_places(
    serving: Serving,
) -> None:
    async with serving(always(a=4.0)) as client:
        async with http_of(client) as caller:
            status, found = await caller.post(
                model=MODEL, prompt=">", banned_sequences=[[5], [5, 9999]]
            )

    assert (status, found["error"]["param"]) == (400, "banned_sequences")
    assert found["error"]["message"] == (
        f"banned_sequences[1][1]: 9999 is outside the vocabulary, 0 to {VOCAB_SIZE - 1}"
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "aaaaaa"),
        ({"logit_bias": {"99": 5}}, "cccccc"),
        ({"presence_penalty": 1.5}, "abcaaa"),
        ({"frequency_penalty": 1}, "abacba"),
        ({"no_repeat_ngram": 2}, "aabaca"),
        ({"no_repeat_ngram": 2, "stop": "ba"}, "aa"),
        ({"temperature": 0, "top_p": 0.5}, "aaaaaa"),
    ],
)
async def test_options_of_openai_whole_and_streamed(
    options: dict[str, object], text: str, serving: Serving
) -> None:
    async with serving(always(a=4.0, b=3.5, c=2.8)) as client:
        async with http_of(client) as caller:
            asked = {"model": MODEL, "prompt": ">", "max_tokens": 6, "logprobs": 1, **options}
            _, whole = await caller.post(**asked)
            *events, done = await caller.stream(**asked)

    (choice,) = whole["choices"]
    assert (choice["text"], done) == (text, "[DONE]")
    assert "".join(one["choices"][0]["text"] for one in events) == text
    assert choice["finish_reason"] == ("stop" if "stop" in options else "length")
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    tokens = [t for one in events[:-1] for t in one["choices"][0]["logprobs"]["tokens"]]
    assert tokens == choice["logprobs"]["tokens"]
