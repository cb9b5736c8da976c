"""Finds every impossible value among a request's options, named by its path in the protocol."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

from engine.config import RequestLimits
from engine.errors import FieldViolation, InvalidRequest
from engine.requests.bounds import (
    MAX_LENGTH_PENALTY,
    MAX_LOGIT_BIAS,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
)
from engine.requests.request import BeamEnd, Constraint, LogitControls, SamplingParams
from engine.requests.token_ids import MAX_NAMED_IDS, check_token_ids

_BEAM_ENDS = get_args(BeamEnd)
_NO_CONTROLS = LogitControls()

_Check = tuple[bool, str, str]  # whether the field is good, its path, what is wrong if it is not


def check_sampling_params(
    params: SamplingParams, *, limits: RequestLimits, vocab_size: int, has_encoder: bool = True
) -> list[FieldViolation]:
    """Return one violation for every impossible field of `params`."""
    checks = (
        *_check_sampling(params, vocab_size),
        *_check_best_of(params, limits),
        *_check_beam(params, limits),
        *_check_num_outputs(params, limits),
        *_check_forced(params, limits, vocab_size),
        *_check_controls(params.controls, limits, vocab_size),
        *_check_constraint(params.constraint, limits),
        *_check_end(params),
        *_check_lengths(params),
        *_check_stops(params, limits, vocab_size),
        *_check_output(params, limits, has_encoder),
    )
    return [
        FieldViolation(path, description) for is_good, path, description in checks if not is_good
    ]


def check_logprobs(count: int | None, path: str, limits: RequestLimits) -> list[FieldViolation]:
    """Return what is wrong with a number of alternatives for every position."""
    if count is None or 0 <= count <= limits.max_logprobs:
        return []
    what = f"{count} is outside 0 to {limits.max_logprobs} alternatives; 0 gives the chosen token's"
    return [FieldViolation(path, what)]


def raise_if_any(violations: list[FieldViolation]) -> None:
    """Raise InvalidRequest if there is a violation."""
    if violations:
        raise InvalidRequest(violations)


def _check_sampling(p: SamplingParams, vocab_size: int) -> Iterator[_Check]:
    path = "decoding.sampling"
    yield (
        math.isfinite(p.temperature) and p.temperature > 0,
        f"{path}.temperature",
        f"{p.temperature:g} is not above 0 and finite; for the most likely token ask for greedy",
    )
    yield (
        0 <= p.top_k <= vocab_size,
        f"{path}.top_k",
        f"{p.top_k} is outside 0 to {vocab_size}, the vocabulary; 0 means all",
    )
    yield 0 < p.top_p <= 1, f"{path}.top_p", f"{p.top_p:g} is outside (0, 1]; 1 means all"
    yield 0 <= p.min_p < 1, f"{path}.min_p", f"{p.min_p:g} is outside [0, 1); 0 means all"
    yield (
        0 < p.typical_p <= 1,
        f"{path}.typical_p",
        f"{p.typical_p:g} is outside (0, 1]; 1 means all",
    )
    yield (
        p.seed is None or 0 <= p.seed < 2**64,
        f"{path}.seed",
        f"{p.seed} is not an unsigned 64-bit number",
    )


def _check_best_of(p: SamplingParams, limits: RequestLimits) -> Iterator[_Check]:
    if p.best_of is None:
        return
    path = "decoding.sampling.best_of"
    yield p.strategy == "sampling", path, f"{p.best_of} of {p.strategy} search: only of sampling"
    yield (
        p.num_outputs <= p.best_of <= limits.max_best_of,
        path,
        f"{p.best_of} is outside num_outputs ({p.num_outputs}) to {limits.max_best_of}; "
        "leave it out to sample as many as are returned",
    )


def _check_beam(p: SamplingParams, limits: RequestLimits) -> Iterator[_Check]:
    if p.strategy != "beam":
        return
    yield (
        1 <= p.beam_width <= limits.max_beam_width,
        "decoding.beam.width",
        f"{p.beam_width} is outside 1 to {limits.max_beam_width} hypotheses",
    )
    yield (
        0 <= p.length_penalty <= MAX_LENGTH_PENALTY,
        "decoding.beam.length_penalty",
        f"{p.length_penalty:g} is outside 0 to {MAX_LENGTH_PENALTY:g}; 0 means none",
    )
    power = p.length_power
    yield (
        power is None or abs(power) <= MAX_LENGTH_PENALTY,
        "decoding.beam.length_power",
        f"{power} is outside -{MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}; 0 means none",
    )
    yield (
        p.beam_end in _BEAM_ENDS,
        "decoding.beam.end",
        f"{p.beam_end} is none of {', '.join(_BEAM_ENDS)}",
    )


def _check_num_outputs(p: SamplingParams, limits: RequestLimits) -> Iterator[_Check]:
    path = "decoding.num_outputs"
    yield (
        1 <= p.num_outputs <= limits.max_num_outputs,
        path,
        f"{p.num_outputs} is outside 1 to {limits.max_num_outputs}",
    )
    yield (
        p.num_outputs <= 1 or p.strategy != "greedy",
        path,
        f"{p.num_outputs} outputs of greedy search would all be equal; ask for sampling or beam "
        "search, or for 1",
    )
    yield (
        p.strategy != "beam" or p.num_outputs <= max(p.beam_width, 1),
        path,
        f"{p.num_outputs} outputs of {p.beam_width} hypotheses; ask for fewer, or for a "
        "decoding.beam.width that is at least as large",
    )


def _check_forced(p: SamplingParams, limits: RequestLimits, vocab_size: int) -> Iterator[_Check]:
    path, count = "decoding.forced_begin", len(p.forced_begin)
    yield (
        count <= limits.max_forced_tokens,
        path,
        f"{count} tokens are more than {limits.max_forced_tokens}; send them as target prefix",
    )
    most = p.max_new_tokens or 0  # below 1: none, or one that is refused
    within = most < 1 or count <= most
    yield within, path, f"{count} tokens are more than max_new_tokens ({most})"
    yield from _check_ids(p.forced_begin, path, vocab_size)
    if p.forced_end is not None:
        end = p.forced_end
        yield (
            0 <= end < vocab_size,
            "decoding.forced_end",
            f"{end} is outside the vocabulary, 0 to {vocab_size - 1}",
        )


def _check_controls(c: LogitControls, limits: RequestLimits, vocab_size: int) -> Iterator[_Check]:
    if c == _NO_CONTROLS:  # as in most requests
        return
    path = "decoding.controls"
    yield (
        MIN_REPETITION_PENALTY <= c.repetition_penalty <= MAX_REPETITION_PENALTY,
        f"{path}.repetition_penalty",
        f"{c.repetition_penalty:g} is outside {MIN_REPETITION_PENALTY:g} to "
        f"{MAX_REPETITION_PENALTY:g}; 1 means none",
    )
    for name in ("frequency_penalty", "presence_penalty"):
        value: float = getattr(c, name)
        yield -2 <= value <= 2, f"{path}.{name}", f"{value:g} is outside -2 to 2; 0 means none"
    for name in ("no_repeat_ngram", "encoder_no_repeat_ngram"):
        size: int = getattr(c, name)
        yield size >= 0, f"{path}.{name}", f"{size} is below 0; 0 means none"
    yield from _check_biases(c, limits, vocab_size)
    for name in ("banned_tokens", "begin_banned_tokens"):
        yield from _check_banned(getattr(c, name), f"{path}.{name}", limits, vocab_size)
    yield from _check_banned_sequences(c, limits, vocab_size)


def _check_biases(c: LogitControls, limits: RequestLimits, vocab_size: int) -> Iterator[_Check]:
    path = "decoding.controls.logit_bias"
    yield (
        len(c.logit_bias) <= limits.max_logit_biases,
        path,
        f"{len(c.logit_bias)} tokens are more than {limits.max_logit_biases}; send fewer",
    )
    yield from _check_ids([token_id for token_id, _ in c.logit_bias], path, vocab_size, by_id=True)
    wrong = [(i, bias) for i, bias in c.logit_bias if not abs(bias) <= MAX_LOGIT_BIAS]
    for token_id, bias in wrong[:MAX_NAMED_IDS]:
        yield (
            False,
            f"{path}[{token_id}]",
            f"{bias:g} is outside -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}; banned_tokens keep "
            "a token out altogether",
        )


def _check_banned(
    ids: tuple[int, ...], path: str, limits: RequestLimits, vocab_size: int
) -> Iterator[_Check]:
    yield (
        len(ids) <= limits.max_banned_tokens,
        path,
        f"{len(ids)} tokens are more than {limits.max_banned_tokens}; send fewer",
    )
    yield from _check_ids(ids, path, vocab_size)
    yield (
        len(set(ids)) < vocab_size,
        path,
        f"all {vocab_size} tokens of the vocabulary are banned; leave at least one",
    )


def _check_banned_sequences(
    c: LogitControls, limits: RequestLimits, vocab_size: int
) -> Iterator[_Check]:
    path, most = "decoding.controls.banned_sequences", limits.max_banned_tokens
    count = sum(map(len, c.banned_sequences))
    yield count <= most, path, f"{count} tokens in all are more than {most}; send fewer"
    for i, ids in enumerate(c.banned_sequences[:most]):
        yield bool(ids), f"{path}[{i}]", "is empty; give at least one token"
        yield from _check_ids(ids, f"{path}[{i}].ids", vocab_size)


def _check_constraint(c: Constraint | None, limits: RequestLimits) -> Iterator[_Check]:
    if c is None:
        return
    path = f"decoding.constraint.{c.kind}"
    chars = sum(map(len, c.values))
    yield bool(c.values) and all(c.values), path, "is empty; leave the constraint out for none"
    yield (
        chars <= limits.max_constraint_chars,
        path,
        f"{chars:,} characters are more than {limits.max_constraint_chars:,}; shorten it",
    )
    yield (
        len(c.values) <= (limits.max_choices if c.kind == "choice" else 1),
        path,
        f"{len(c.values)} of them are more than {limits.max_choices}; send fewer",
    )


def _check_end(p: SamplingParams) -> Iterator[_Check]:
    yield (
        p.constraint is None or not p.ignore_eos,
        "stopping.ignore_eos",
        "a constrained output ends where the constraint does; leave one of the two out",
    )


def _check_lengths(p: SamplingParams) -> Iterator[_Check]:
    yield (
        p.max_new_tokens is None or p.max_new_tokens >= 1,
        "stopping.max_new_tokens",
        f"{p.max_new_tokens} is below 1; leave it out for the model's limit",
    )
    most = p.max_new_tokens or 0  # below 1: none, or one that is refused
    yield (
        p.min_new_tokens >= 0 and (most < 1 or p.min_new_tokens <= most),
        "stopping.min_new_tokens",
        f"{p.min_new_tokens} is outside 0 to max_new_tokens ({p.max_new_tokens})",
    )


def _check_stops(p: SamplingParams, limits: RequestLimits, vocab_size: int) -> Iterator[_Check]:
    yield (
        len(p.stop_strings) <= limits.max_stop_strings,
        "stopping.strings",
        f"{len(p.stop_strings)} stop strings are more than {limits.max_stop_strings}",
    )
    for i, stop in enumerate(p.stop_strings[: limits.max_stop_strings]):
        yield (
            1 <= len(stop) <= limits.max_stop_string_chars,
            f"stopping.strings[{i}]",
            f"{len(stop)} characters are outside 1 to {limits.max_stop_string_chars}",
        )
    yield (
        len(p.stop_token_ids) <= limits.max_stop_token_ids,
        "stopping.token_ids",
        f"{len(p.stop_token_ids)} stop tokens are more than {limits.max_stop_token_ids}",
    )
    yield from _check_ids(p.stop_token_ids, "stopping.token_ids", vocab_size)


def _check_output(p: SamplingParams, limits: RequestLimits, has_encoder: bool) -> Iterator[_Check]:
    for name in ("logprobs", "prompt_logprobs"):
        for violation in check_logprobs(getattr(p, name), f"output.{name}", limits):
            yield False, violation.field, violation.description
    yield (
        has_encoder or not p.alignment,
        "output.alignment",
        "this model has no encoder, so there is no source to align with; leave it out",
    )


def _check_ids(
    ids: list[int] | tuple[int, ...], path: str, vocab_size: int, *, by_id: bool = False
) -> Iterator[_Check]:
    """Name the first ids outside the vocabulary by their place, or by themselves."""
    found = check_token_ids(
        ids, vocab_size, lambda i, token_id: f"{path}[{token_id if by_id else i}]"
    )
    for violation in found:
        yield False, violation.field, violation.description
