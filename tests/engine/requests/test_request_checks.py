"""Every impossible option is named with its value, what is allowed, and the way out."""

from __future__ import annotations

from typing import Any

import pytest

from engine.config import RequestLimits
from engine.requests.checks import check_sampling_params
from engine.requests.request import Constraint, LogitControls, SamplingParams

VOCAB_SIZE = 100
NAN = float("nan")


def _violations(params: SamplingParams, *, has_encoder: bool = True) -> dict[str, str]:
    found = check_sampling_params(
        params, limits=RequestLimits(), vocab_size=VOCAB_SIZE, has_encoder=has_encoder
    )
    return {violation.field: violation.description for violation in found}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"strategy": "beam", "beam_width": 16, "num_outputs": 8, "length_penalty": 0.0},
        {"strategy": "beam", "beam_width": 1, "beam_end": "limit", "stop_token_ids": (3,)},
        {"strategy": "beam", "beam_width": 4, "stop_strings": ("\n",), "include_stop": True},
        {"strategy": "sampling", "num_outputs": 8, "best_of": 16, "typical_p": 0.1},
        {"strategy": "sampling", "best_of": 1},
        {"logprobs": 0, "prompt_logprobs": 20, "alignment": True, "allow_partial": True},
        {"controls": LogitControls(1.5, 2.0, -2.0, 4, ((0, 1e4), (99, -1e4)), (0, 99))},
        {"constraint": Constraint("choice", ("yes", "no"))},
        {"constraint": Constraint("json_schema", ("{}",))},
    ],
)
def test_what_is_possible_passes(fields: dict[str, Any]) -> None:
    assert _violations(SamplingParams(**fields)) == {}


def _wrong_sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(strategy="sampling", **fields)


def _wrong_beam(**fields: Any) -> SamplingParams:
    return SamplingParams(strategy="beam", **({"beam_width": 4} | fields))


@pytest.mark.parametrize(
    ("params", "path", "what"),
    [
        (_wrong_sampling(typical_p=0.0), "decoding.sampling.typical_p", "0 is outside (0, 1]"),
        (_wrong_sampling(typical_p=NAN), "decoding.sampling.typical_p", "nan is outside (0, 1]"),
        (
            _wrong_sampling(num_outputs=3, best_of=2),
            "decoding.sampling.best_of",
            "2 is outside num_outputs (3) to 16; leave it out",
        ),
        (_wrong_sampling(best_of=17), "decoding.sampling.best_of", "17 is outside"),
        (SamplingParams(best_of=2), "decoding.sampling.best_of", "only of sampling"),
        (_wrong_beam(beam_width=0), "decoding.beam.width", "0 is outside 1 to 16 hypotheses"),
        (_wrong_beam(beam_width=17), "decoding.beam.width", "17 is outside 1 to 16"),
        (_wrong_beam(length_penalty=11.0), "decoding.beam.length_penalty", "11 is outside -10 to"),
        (_wrong_beam(length_penalty=NAN), "decoding.beam.length_penalty", "nan is outside"),
        (_wrong_beam(length_penalty=-10.5), "decoding.beam.length_penalty", "-10.5 is outside"),
        (
            _wrong_beam(length_penalty_form="log"),
            "decoding.beam.length_penalty_form",
            "log is none of power, paper",
        ),
        (_wrong_beam(beam_end="soon"), "decoding.beam.end", "soon is none of bound, estimate, en"),
        (_wrong_beam(num_outputs=5), "decoding.num_outputs", "5 outputs of 4 hypotheses; ask for"),
        (SamplingParams(num_outputs=2), "decoding.num_outputs", "ask for sampling or beam search"),
        (_wrong_sampling(num_outputs=9), "decoding.num_outputs", "9 is outside 1 to 8"),
        (SamplingParams(num_outputs=0), "decoding.num_outputs", "0 is outside 1 to 8"),
        (SamplingParams(forced_begin=(5, 100)), "decoding.forced_begin[1]", "100 is outside the"),
        (SamplingParams(forced_begin=(5,) * 65), "decoding.forced_begin", "65 tokens are more"),
        (
            SamplingParams(forced_begin=(5, 6), max_new_tokens=1),
            "decoding.forced_begin",
            "2 tokens are more than max_new_tokens (1)",
        ),
        (SamplingParams(forced_end=100), "decoding.forced_end", "100 is outside the vocabulary"),
        (SamplingParams(logprobs=21), "output.logprobs", "21 is outside 0 to 20 alternatives"),
        (SamplingParams(prompt_logprobs=-1), "output.prompt_logprobs", "-1 is outside 0 to 20"),
    ],
)
def test_wrong_choices_are_named(params: SamplingParams, path: str, what: str) -> None:
    violations = _violations(params)

    assert list(violations)[-1] == path
    assert what in violations[path]


def test_of_an_impossible_limit_nothing_else_is_said() -> None:
    assert list(_violations(SamplingParams(max_new_tokens=-1))) == ["stopping.max_new_tokens"]


def test_several_outputs_of_no_tokens_are_refused() -> None:
    params = SamplingParams("sampling", max_new_tokens=0, num_outputs=2)

    assert _violations(params) == {
        "decoding.num_outputs": "2 outputs of no tokens would all be equal; ask for 1"
    }


@pytest.mark.parametrize(
    ("fields", "path", "what"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty", "0 is outside 0.01 to 100; 1 means"),
        ({"repetition_penalty": NAN}, "repetition_penalty", "nan is outside"),
        ({"frequency_penalty": 2.5}, "frequency_penalty", "2.5 is outside -2 to 2; 0 means none"),
        ({"presence_penalty": -3.0}, "presence_penalty", "-3 is outside -2 to 2"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram", "-1 is below 0; 0 means none"),
        ({"logit_bias": ((100, 1.0),)}, "logit_bias[100]", "100 is outside the vocabulary"),
        ({"logit_bias": ((7, NAN),)}, "logit_bias[7]", "nan is outside -10000 to 10000"),
        ({"logit_bias": ((7, 0.0),) * 1025}, "logit_bias", "1025 tokens are more than 1024"),
        ({"banned_tokens": (5, -1)}, "banned_tokens[1]", "-1 is outside the vocabulary, 0 to 99"),
        ({"banned_tokens": (5,) * 1025}, "banned_tokens", "1025 tokens are more than 1024"),
        ({"banned_tokens": tuple(range(100))}, "banned_tokens", "all 100 tokens"),
        ({"allowed_token_ids": (5, 100)}, "allowed_token_ids[1]", "100 is outside the voc"),
        ({"begin_banned_tokens": (100,)}, "begin_banned_tokens[0]", "100 is outside the voc"),
        ({"begin_banned_tokens": tuple(range(100))}, "begin_banned_tokens", "all 100 tokens"),
        ({"encoder_no_repeat_ngram": -1}, "encoder_no_repeat_ngram", "-1 is below 0"),
        ({"banned_sequences": ((1, 2), ())}, "banned_sequences[1]", "is empty"),
        ({"banned_sequences": ((1, 100),)}, "banned_sequences[0].ids[1]", "100 is outside the"),
        ({"banned_sequences": ((1, 2),) * 513}, "banned_sequences", "1026 tokens in all are"),
    ],
)
def test_wrong_controls_are_named(fields: dict[str, Any], path: str, what: str) -> None:
    violations = _violations(SamplingParams(controls=LogitControls(**fields)))

    assert list(violations) == [f"decoding.controls.{path}"]
    assert what in violations[f"decoding.controls.{path}"]


@pytest.mark.parametrize(
    ("constraint", "what"),
    [
        (Constraint("regex", ("",)), "is empty; leave the constraint out"),
        (Constraint("choice", ()), "is empty"),
        (Constraint("choice", ("a", "")), "is empty"),
        (Constraint("choice", ("a",) * 257), "257 of them are more than 256"),
        (Constraint("grammar", ("a" * 65537,)), "65,537 characters are more than 65,536"),
    ],
)
def test_wrong_constraints_are_named(constraint: Constraint, what: str) -> None:
    violations = _violations(SamplingParams(constraint=constraint))

    assert what in violations[f"decoding.constraint.{constraint.kind}"]


def test_a_constraint_and_allowed_tokens_exclude_each_other() -> None:
    controls = LogitControls(allowed_token_ids=(5,))
    params = SamplingParams(controls=controls, constraint=Constraint("regex", ("a",)))

    assert list(_violations(params)) == ["decoding.controls.allowed_token_ids"]


def test_alignment_needs_an_encoder() -> None:
    violations = _violations(SamplingParams(alignment=True), has_encoder=False)

    assert "no encoder" in violations["output.alignment"]


def test_no_more_than_eight_wrong_ids_are_named() -> None:
    violations = _violations(SamplingParams(stop_token_ids=tuple(range(100, 150))))

    assert list(violations) == [f"stopping.token_ids[{i}]" for i in range(8)]
