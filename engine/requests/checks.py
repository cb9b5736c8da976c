"""Finds every impossible value among a request's options, named by its path in the protocol."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter
from typing import Any

from engine.config import RequestLimits
from engine.errors import FieldViolation, InvalidRequest
from engine.requests.options import BY_NAME, OPTIONS, Option, Range
from engine.requests.request import LogitControls, SamplingParams
from engine.requests.token_ids import MAX_NAMED_IDS, check_token_ids

_MAX_LOGIT_BIAS = 1e4  # logits must stay finite

_OPTIONS = tuple(option for option in OPTIONS if option.message != "decoding.constraint")
_DEFAULTS = tuple(option.default for option in _OPTIONS)
_values = attrgetter(
    *(
        f"controls.{option.field}" if option.message == "decoding.controls" else option.field
        for option in _OPTIONS
    )
)

_Check = tuple[bool, str, str]  # whether the field is good, its path, what is wrong if it is not


def check_sampling_params(
    params: SamplingParams, *, limits: RequestLimits, vocab_size: int, has_encoder: bool = True
) -> list[FieldViolation]:
    """Return one violation for every impossible field of `params`."""
    found = []
    for option, value, default in zip(_OPTIONS, _values(params), _DEFAULTS, strict=True):
        if value == default and option.name != "beam":  # a server may allow no beams
            continue
        if option.strategy != "beam" or params.strategy == "beam":
            found += check_option(option, value, limits, vocab_size)
    together = (
        *_check_outputs(params, limits),
        *_check_lengths(params),
        *_check_bans(params.controls, vocab_size),
        *_check_constraint(params, limits),
        (
            has_encoder or not params.alignment,
            "output.alignment",
            "this model has no encoder, so there is no source to align with; leave it out",
        ),
    )
    return found + _wrong(together)


def check_option(
    option: Option, value: Any, limits: RequestLimits, vocab_size: int
) -> list[FieldViolation]:
    """Return what is wrong with the value of an option, whatever is beside it."""
    if not isinstance(bounds := option.bounds, Range):
        return _wrong(_check_words_or_ids(option, value, limits, vocab_size))
    end = bounds.end(limits, vocab_size)
    if bounds.has(value, end):
        return []
    shown = f"{value:g}" if option.kind == "number" else value
    off = f"; {option.off}" if option.off else ""
    return [FieldViolation(option.path, f"{shown} {bounds.refusal(end)}{option.hint}{off}")]


def check_logprobs(count: int, path: str, limits: RequestLimits) -> list[FieldViolation]:
    """Return what is wrong with a number of alternatives for every position."""
    found = check_option(BY_NAME["logprobs"], count, limits, 0)
    return [FieldViolation(path, violation.description) for violation in found]


def raise_if_any(violations: list[FieldViolation]) -> None:
    """Raise InvalidRequest if there is a violation."""
    if violations:
        raise InvalidRequest(violations)


def _wrong(checks: Iterable[_Check]) -> list[FieldViolation]:
    return [FieldViolation(path, what) for is_good, path, what in checks if not is_good]


def _check_words_or_ids(
    option: Option, value: Any, limits: RequestLimits, vocab_size: int
) -> Iterator[_Check]:
    assert not isinstance(option.bounds, Range)
    path, most = option.path, getattr(limits, option.bounds) if option.bounds else 0
    match option.kind:
        case "word":
            what = f"{value} is none of {', '.join(option.words)}"
            yield value in option.words, path, what
        case "id":
            yield from _check_ids((value,), path, vocab_size)
        case "ids" | "run":
            yield _check_count(option, len(value), "tokens", most)
            yield from _check_ids(value, f"{path}[{{place}}]", vocab_size)
        case "runs":
            yield _check_count(option, sum(map(len, value)), "tokens in all", most)
            for i, ids in enumerate(value[:most]):
                yield bool(ids), f"{path}[{i}]", "is empty; give at least one token"
                yield from _check_ids(ids, f"{path}[{i}].ids[{{place}}]", vocab_size)
        case "biases":
            yield _check_count(option, len(value), "tokens", most)
            ids = [token_id for token_id, _ in value]
            yield from _check_ids(ids, f"{path}[{{id}}]", vocab_size)
            wrong = [(i, bias) for i, bias in value if not abs(bias) <= _MAX_LOGIT_BIAS]
            for token_id, bias in wrong[:MAX_NAMED_IDS]:
                what = f"{bias:g} is outside -{_MAX_LOGIT_BIAS:g} to {_MAX_LOGIT_BIAS:g}"
                way_out = "banned_tokens keep a token out altogether"
                yield False, f"{path}[{token_id}]", f"{what}; {way_out}"
        case "texts":
            yield _check_count(option, len(value), "of them", most)
            for i, text in enumerate(value[:most]):
                longest = limits.max_stop_string_chars
                what = f"{len(text)} characters are outside 1 to {longest}"
                yield 1 <= len(text) <= longest, f"{path}[{i}]", what


def _check_count(option: Option, count: int, what: str, most: int) -> _Check:
    hint = option.hint or "; send fewer"
    return count <= most, option.path, f"{count} {what} are more than {most}{hint}"


def _check_ids(ids: Iterable[int], path: str, vocab_size: int) -> Iterator[_Check]:
    for violation in check_token_ids(
        ids, vocab_size, lambda i, token_id: path.format(place=i, id=token_id)
    ):
        yield False, violation.field, violation.description


def _check_outputs(p: SamplingParams, limits: RequestLimits) -> Iterator[_Check]:
    if p.best_of is not None:
        path = "decoding.sampling.best_of"
        is_sampled = p.strategy == "sampling"
        yield is_sampled, path, f"{p.best_of} of {p.strategy} search: only of sampling"
        yield (
            p.num_outputs <= p.best_of <= limits.max_best_of,
            path,
            f"{p.best_of} is outside num_outputs ({p.num_outputs}) to {limits.max_best_of}; "
            "leave it out to sample as many as are returned",
        )
    if p.num_outputs > 1:
        path = "decoding.num_outputs"
        yield (
            p.max_new_tokens != 0,
            path,
            f"{p.num_outputs} outputs of no tokens would all be equal; ask for 1",
        )
        yield (
            p.strategy != "greedy",
            path,
            f"{p.num_outputs} outputs of greedy search would all be equal; ask for sampling or "
            "beam search, or for 1",
        )
        yield (
            p.strategy != "beam" or p.num_outputs <= max(p.beam_width, 1),
            path,
            f"{p.num_outputs} outputs of {p.beam_width} hypotheses; ask for fewer, or for a "
            "decoding.beam.width that is at least as large",
        )


def _check_lengths(p: SamplingParams) -> Iterator[_Check]:
    most = p.max_new_tokens or 0  # below 1: none, one that is refused, or nothing is generated
    count = len(p.forced_begin)
    yield (
        most < 1 or count <= most,
        "decoding.forced_begin",
        f"{count} tokens are more than max_new_tokens ({most})",
    )
    yield (
        most < 1 or p.min_new_tokens <= most,
        "stopping.min_new_tokens",
        f"{p.min_new_tokens} is outside 0 to max_new_tokens ({most})",
    )


def _check_bans(c: LogitControls, vocab_size: int) -> Iterator[_Check]:
    for name in ("banned_tokens", "begin_banned_tokens"):
        ids = getattr(c, name)
        yield (
            len(ids) < vocab_size or len(set(ids)) < vocab_size,
            f"decoding.controls.{name}",
            f"all {vocab_size} tokens of the vocabulary are banned; leave at least one",
        )


def _check_constraint(p: SamplingParams, limits: RequestLimits) -> Iterator[_Check]:
    if (c := p.constraint) is None:
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
    yield (
        not p.controls.allowed_token_ids,
        "decoding.controls.allowed_token_ids",
        "a constrained output has the tokens that its constraint allows; leave one of the two out",
    )
    yield (
        not p.ignore_eos,
        "stopping.ignore_eos",
        "a constrained output ends where the constraint does; leave one of the two out",
    )
