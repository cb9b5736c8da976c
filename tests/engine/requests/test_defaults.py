"""Defaults of a package: what they fill in, and what a request has in their place."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from engine.requests.defaults import sampling_params
from engine.requests.generation_defaults import GenerationDefaults
from engine.requests.request import LogitControls, SamplingParams

BEAM = GenerationDefaults(
    strategy="beam",
    beam=4,
    length_penalty=2.0,
    length_penalty_form="paper",
    beam_end="enough",
    no_repeat_ngram=3,
    banned_tokens=(7,),
    forced_begin=(1,),
    forced_end=2,
    max_new_tokens=60,
    min_new_tokens=10,
)
SAMPLING = GenerationDefaults(strategy="sampling", temperature=0.6, top_k=50, top_p=0.9)
CONTROLS = LogitControls(no_repeat_ngram=3, banned_tokens=(7,))


def test_a_request_that_says_nothing_gets_all_defaults() -> None:
    assert sampling_params({}, BEAM) == SamplingParams(
        strategy="beam",
        beam_width=4,
        length_penalty=2.0,
        length_penalty_form="paper",
        beam_end="enough",
        forced_begin=(1,),
        forced_end=2,
        controls=CONTROLS,
        max_new_tokens=60,
        min_new_tokens=10,
    )


def test_a_package_without_defaults_leaves_those_of_the_engine() -> None:
    assert sampling_params({}, GenerationDefaults()) == SamplingParams()
    assert GenerationDefaults().given == {}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"beam_width": 2}, {"beam_width": 2, "length_penalty": 2.0}),
        ({"length_penalty": -1.0}, {"length_penalty": -1.0, "length_penalty_form": None}),
        ({"length_penalty_form": "power"}, {"length_penalty": None}),
        ({"beam_end": "bound"}, {"beam_end": "bound"}),
        ({"banned_tokens": (9,)}, {"controls": LogitControls(0, 0, 0, 3, (), (9,))}),
        ({"no_repeat_ngram": 0}, {"controls": LogitControls(banned_tokens=(7,))}),
        ({"forced_end": 5}, {"forced_end": 5}),
        ({"strategy": "greedy"}, {"strategy": "greedy", "length_penalty": None, "beam_width": 1}),
        ({"strategy": "sampling"}, {"strategy": "sampling", "beam_end": "bound"}),
        ({"max_new_tokens": 5}, {"max_new_tokens": 5, "min_new_tokens": 5}),
        ({"min_new_tokens": 80}, {"max_new_tokens": 80, "min_new_tokens": 80}),
        ({"min_new_tokens": 0}, {"max_new_tokens": 60, "min_new_tokens": 0}),
    ],
)
def test_what_a_request_names_is_its_own(asked: dict[str, Any], expected: dict[str, Any]) -> None:
    params = sampling_params(asked, BEAM)

    for name, value in expected.items():
        found = getattr(params, name)
        if isinstance(value, LogitControls):
            assert (found.no_repeat_ngram, found.banned_tokens) == (
                value.no_repeat_ngram,
                value.banned_tokens,
            )
        else:
            assert found == value, name


def test_a_contradiction_of_the_request_itself_stays_one() -> None:
    params = sampling_params({"max_new_tokens": 5, "min_new_tokens": 6}, BEAM)

    assert (params.max_new_tokens, params.min_new_tokens) == (5, 6)


def test_defaults_may_be_left_away_by_name_or_all() -> None:
    some = sampling_params({}, BEAM, {"strategy", "banned_tokens", "max_new_tokens"})

    assert (some.strategy, some.controls.banned_tokens, some.max_new_tokens) == ("greedy", (), None)
    assert (some.controls.no_repeat_ngram, some.forced_begin) == (3, (1,))
    assert sampling_params({"strategy": "sampling"}, SAMPLING, {"*"}) == SamplingParams("sampling")


def test_options_of_another_strategy_hold_where_that_is_asked_for() -> None:
    assert sampling_params({}, SAMPLING).temperature == 0.6
    assert sampling_params({"strategy": "greedy"}, SAMPLING) == SamplingParams()
    own = sampling_params({"strategy": "sampling", "temperature": 1.5}, SAMPLING)
    assert (own.temperature, own.top_k) == (1.5, 50)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"length_penalty": 11.0},
        {"length_penalty": float("nan")},
        {"beam": 0},
        {"banned_tokens": (-1,)},
        {"banned_sequences": ((),)},
        {"forced_begin": tuple(range(65))},
        {"max_new_tokens": 0},
        {"min_new_tokens": -1},
        {"num_outputs": 2},
    ],
)
def test_impossible_defaults_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        GenerationDefaults.model_validate(wrong)
