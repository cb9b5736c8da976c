"""Beam search that ends at stop strings: against a plain loop on whole texts, and in an engine."""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from engine.generation.async_engine import AsyncEngine
from engine.requests.events import FinishReason, RequestFinished, SequenceFinished
from engine.requests.request import GenerationRequest, SamplingParams
from engine.sampling.beam_search import BeamSearch
from engine.sampling.draws import Candidate
from engine.sampling.stop_rule import StopRule, searched_text
from engine.text.tokenizer import Tokenizer
from tests.engine.sampling.test_beam_search import Model, params, penalised, random_model, run

EOS = 0
TOKENS = ("</s>", "a", "b", "ab", "ba", "c", "Ġa")
MakeEngine = Callable[..., Awaitable[tuple[AsyncEngine, object]]]
Script = Callable[[list[int], list[int]], np.ndarray]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    made = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, []))
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return Tokenizer(path)


def search_for(p: SamplingParams, tokenizer: Tokenizer, max_new_tokens: int = 9, prefix=()):
    stop_rule = StopRule(p, frozenset({EOS}), max_new_tokens)
    text = searched_text(p, tokenizer, prefix) if p.stop_strings else None
    return BeamSearch(p, stop_rule, text)


def stop_in(text: str, stops: tuple[str, ...]) -> str | None:
    """Return the stop string that is complete first."""
    for end in range(len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return stop
    return None


def plain_beam_search(
    model: Model, p: SamplingParams, max_new_tokens: int, tokenizer: Tokenizer
) -> list[tuple[tuple[int, ...], float, str | None]]:
    """The algorithm on whole sequences and whole texts, always to the last step."""
    running: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    finished: list[tuple[tuple[int, ...], float, str | None]] = []
    for length in range(1, max_new_tokens + 1):
        continuations = [
            ((*tokens, token_id), total + logprob)
            for tokens, total in running
            for token_id, logprob in enumerate(model(tokens))
        ]
        continuations.sort(key=lambda item: -item[1])
        del continuations[2 * p.beam_width :]
        stops = [stop_in(tokenizer.decode(tokens), p.stop_strings) for tokens, _ in continuations]
        is_open = [
            tokens[-1] != EOS and stop is None and length < max_new_tokens
            for (tokens, _), stop in zip(continuations, stops, strict=True)
        ]
        for (tokens, total), stop, goes_on in list(zip(continuations, stops, is_open, strict=True))[
            : p.beam_width
        ]:
            if not goes_on:
                stop = stop if length < max_new_tokens else None  # the limit is why it ends
                finished.append((tokens, penalised(total, tokens, p), stop))
        running = list(itertools.compress(continuations, is_open))[: p.beam_width]
    return sorted(finished, key=lambda item: -item[1])[: p.num_outputs]


@settings(max_examples=300)
@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 6),
    num_outputs=st.integers(1, 4),
    alpha=st.sampled_from([0.0, 0.6, 2.0]),
    max_new_tokens=st.integers(1, 7),
    stops=st.lists(st.text(alphabet="abc ", min_size=1, max_size=4), min_size=1, max_size=3),
    beam_end=st.sampled_from(["bound", "limit"]),
)
def test_search_finds_what_a_plain_loop_on_whole_texts_finds(
    tokenizer, seed, width, num_outputs, alpha, max_new_tokens, stops, beam_end
):
    model = random_model(seed, len(TOKENS))
    p = params(
        width,
        num_outputs=min(num_outputs, width),
        length_penalty=alpha,
        length_penalty_form="paper",
        beam_end=beam_end,
        stop_strings=tuple(stops),
    )

    found, _ = run(search_for(p, tokenizer, max_new_tokens), model)

    expected = plain_beam_search(model, p, max_new_tokens, tokenizer)
    assert [(h.token_ids, h.score, h.matched_stop) for h in found] == expected
    for hypothesis in found:
        assert (hypothesis.reason is FinishReason.STOP) == (hypothesis.matched_stop is not None)


@settings(max_examples=100)
@given(seed=st.integers(0, 10_000), width=st.integers(1, 6), max_new_tokens=st.integers(1, 6))
def test_a_stop_string_that_never_comes_changes_nothing(tokenizer, seed, width, max_new_tokens):
    model = random_model(seed, len(TOKENS))
    options = {"num_outputs": width}
    plain = params(width, **options)
    stopping = params(width, stop_strings=("x", "acx"), **options)

    found = run(search_for(stopping, tokenizer, max_new_tokens), model)

    assert found == run(search_for(plain, tokenizer, max_new_tokens), model)


def candidates(*token_ids: int, beam: int = 0) -> list[Candidate]:
    return [Candidate(beam, token, -1.0 - n, -1.0 - n) for n, token in enumerate(token_ids)]


def test_several_candidates_that_reach_a_stop_string_all_leave_the_beams(tokenizer):
    p = params(3, num_outputs=3, beam_end="limit", length_penalty=0.0, stop_strings=("b", "c"))
    search = search_for(p, tokenizer)

    step = search.advance(candidates(2, 1, 3, 5, 6))  # b, a, ab, c, " a"

    assert (step.tokens, step.num_finished) == ((1, 6), 2)
    assert [(h.token_ids, h.score, h.matched_stop) for h in search.hypotheses()] == [
        ((2,), -1.0, "b"),
        ((3,), -3.0, "b"),
    ]


def test_a_stop_string_beyond_the_best_width_candidates_is_dropped(tokenizer):
    search = search_for(params(2, length_penalty=0.0, stop_strings=("c",)), tokenizer)

    step = search.advance(candidates(1, 2, 5))

    assert (step.tokens, step.num_finished) == ((1, 2), 0)
    assert search.hypotheses() == []


def test_a_search_whose_candidates_all_stop_is_over(tokenizer):
    search = search_for(params(2, num_outputs=2, stop_strings=("a",)), tokenizer)

    search.advance(candidates(1, 3, 4, 6))

    assert search.is_done
    assert [h.token_ids for h in search.hypotheses()] == [(1,), (3,)]


def test_beams_keep_the_texts_of_their_own_parents(tokenizer):
    p = params(2, num_outputs=2, beam_end="limit", length_penalty=0.0, stop_strings=("cb",))
    search = search_for(p, tokenizer)

    search.advance(candidates(1, 5))
    search.advance([Candidate(1, 1, -2.0, -1.0), Candidate(0, 5, -3.0, -1.0)])  # "ca", "ac"
    step = search.advance([Candidate(n, 2, -4.0 - n, -1.0) for n in (0, 1)])

    assert step.tokens == (2,)
    (hypothesis,) = search.hypotheses()
    assert (hypothesis.token_ids, hypothesis.matched_stop) == ((1, 5, 2), "cb")


@pytest.mark.parametrize(
    ("options", "reason", "stop"),
    [
        ({"stop_strings": ("c",)}, FinishReason.STOP, "c"),
        ({"stop_strings": ("c",), "stop_token_ids": (5,)}, FinishReason.STOP, 5),
        ({"stop_strings": ("c",), "forced_end": 5, "max_new_tokens": 1}, FinishReason.LENGTH, None),
        (
            {"stop_strings": ("c",), "min_new_tokens": 2, "max_new_tokens": 1},
            FinishReason.LENGTH,
            None,
        ),
        ({"stop_strings": ("cc", "c")}, FinishReason.STOP, "c"),
    ],
)
def test_a_hypothesis_says_what_stopped_it(options, reason, stop, tokenizer):
    p = params(1, num_outputs=1, **({"max_new_tokens": 9} | options))
    search = search_for(p, tokenizer, p.max_new_tokens)

    search.advance(candidates(5))

    (hypothesis,) = search.hypotheses()
    assert (hypothesis.reason, hypothesis.matched_stop) == (reason, stop)


def test_a_stop_string_may_begin_in_the_given_prefix_but_not_end_there(tokenizer):
    p = params(2, num_outputs=1, beam_end="limit", stop_strings=("cc", "ab"))
    search = search_for(p, tokenizer, prefix=(3, 5))

    step = search.advance(candidates(1, 5))

    assert step.tokens == (1,)
    assert search.hypotheses()[0].matched_stop == "cc"


# An engine whose tokens are bytes


async def answer(
    engine: AsyncEngine, prefix: str = "", **options
) -> tuple[list[SequenceFinished], RequestFinished]:
    settings = {"strategy": "beam", "beam_width": 3, "num_outputs": 3, "max_new_tokens": 6}
    asked = SamplingParams(**(settings | options))
    request = GenerationRequest("one", ">", asked, target_prefix=prefix)
    events = [event async for event in engine.generate(request)]
    end = events[-1]
    assert isinstance(end, RequestFinished)
    return [event for event in events if isinstance(event, SequenceFinished)], end


def spell_any(*texts: str) -> Script:
    """Make a script that writes one of several texts and then ends, the earlier the likelier."""
    answers = [[*text.encode(), 257] for text in texts]

    def script(source: list[int], tokens: list[int]) -> np.ndarray:
        logits = np.full(258, -30.0, np.float32)
        written = tokens[tokens.index(ord(">")) + 1 :]
        for n, spelled in enumerate(answers):
            if spelled[: len(written)] == written and len(written) < len(spelled):
                logits[spelled[len(written)]] = max(logits[spelled[len(written)]], -n)
        return logits

    return script


@pytest.mark.parametrize(
    ("options", "texts"),
    [({}, ["ab", "x", "qrs"]), ({"include_stop": True}, ["ab--", "x--", "qrs"])],
)
async def test_the_n_best_end_where_their_texts_come_to_a_stop_string(
    options, texts, make_engine: MakeEngine
) -> None:
    engine, _ = await make_engine(spell_any("ab--tail", "x--tail", "qrs"))

    found, end = await answer(engine, stop_strings=("--", "zz"), length_penalty=0.0, **options)

    assert [one.text for one in found] == texts
    assert [(one.reason, one.matched_stop) for one in found] == [
        (FinishReason.STOP, "--"),
        (FinishReason.STOP, "--"),
        (FinishReason.EOS, None),
    ]
    assert [one.token_ids for one in found] == [(*b"ab--",), (*b"x--",), (*b"qrs", 257)]
    assert end.usage.output_tokens == 11


async def test_a_stop_ends_a_search_that_would_go_on(make_engine: MakeEngine) -> None:
    engine, runner = await make_engine(spell_any("a.bcdefg"))

    found, _ = await answer(engine, stop_strings=(".",), num_outputs=1, length_penalty=0.0)

    assert (found[0].text, found[0].matched_stop) == ("a", ".")
    assert sum(bool(batch.decode_ids or batch.chunks) for batch in runner.batches) == 2


async def test_a_stop_is_scored_with_the_length_of_its_tokens(make_engine: MakeEngine) -> None:
    engine, _ = await make_engine(spell_any("ab--tail", "x--tail", "qrs"))

    found, _ = await answer(engine, stop_strings=("--",), length_penalty=1.0, logprobs=0)

    assert len(found) == 3
    for one in found:
        assert one.score == pytest.approx(one.sum_logprob / len(one.token_ids))
        assert len(one.logprobs) == len(one.token_ids)


async def test_a_stop_string_of_bytes_is_found_with_its_last_byte(make_engine: MakeEngine) -> None:
    engine, _ = await make_engine(spell_any("aéb", "bèc"))

    found, _ = await answer(engine, stop_strings=("é",), num_outputs=2, length_penalty=0.0)

    assert {(one.text, one.matched_stop, one.token_ids) for one in found} == {
        ("a", "é", tuple("aé".encode())),
        ("bèc", None, (*"bèc".encode(), 257)),
    }


async def test_a_given_prefix_is_text_behind_which_a_stop_string_may_go_on(
    make_engine: MakeEngine,
) -> None:
    engine, _ = await make_engine(spell_any("x.y--z"))

    found, _ = await answer(engine, "x.y-", stop_strings=("--", "."), num_outputs=1)

    assert (found[0].text, found[0].matched_stop) == ("x.y", "--")
    assert found[0].token_ids == tuple(b"x.y--")


async def test_a_prefix_that_ends_with_a_stop_string_is_gone_on_with(
    make_engine: MakeEngine,
) -> None:
    engine, _ = await make_engine(spell_any("x.y.z"))

    found, _ = await answer(engine, "x.", stop_strings=(".",), num_outputs=1)

    assert (found[0].text, found[0].matched_stop) == ("x.y", ".")


async def test_stops_wait_for_min_new_tokens(make_engine: MakeEngine) -> None:
    engine, _ = await make_engine(spell_any("a,b,c"))

    found, _ = await answer(engine, stop_strings=(",",), min_new_tokens=3, num_outputs=1)

    assert (found[0].text, found[0].matched_stop) == ("a,b", ",")


async def test_a_stop_token_that_completes_a_stop_string_is_cut_as_without_beams(
    make_engine: MakeEngine,
) -> None:
    engine, _ = await make_engine(spell_any("ab"))
    options = {"stop_strings": ("b",), "stop_token_ids": (ord("b"),), "num_outputs": 1}

    for include in (True, False):
        (beam,), _ = await answer(engine, include_stop=include, **options)
        (greedy,), _ = await answer(
            engine, strategy="greedy", beam_width=1, include_stop=include, **options
        )
        assert (beam.text, beam.matched_stop) == (greedy.text, greedy.matched_stop)
