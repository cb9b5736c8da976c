"""Reads from a request how to decode, and when to stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

from tokenweir.v1 import generation_service_pb2 as pb

from engine.requests import defaults as filling
from engine.requests.generation_defaults import GenerationDefaults
from engine.requests.options import OPTIONS, Kind, Option
from engine.requests.request import Constraint, SamplingParams

_MESSAGES = tuple(
    (attrgetter(message), {one.wire: one for one in OPTIONS if one.message == message})
    for message in dict.fromkeys(option.message for option in OPTIONS)
    if message != "decoding.constraint"
)
_READ: Mapping[Kind, Callable[[Any], object]] = {
    "ids": tuple,
    "run": tuple,
    "texts": tuple,
    "runs": lambda runs: tuple(tuple(run.ids) for run in runs),
    "biases": lambda biases: tuple(sorted(biases.items())),
}
_NO_DEFAULTS = GenerationDefaults()


def named_options(request: pb.GenerateRequest) -> Iterator[tuple[Option, Any]]:
    """Yield the options that a request names, but for the strategy and a constraint.

    Their values are as the protocol has them.
    """
    for message_of, options in _MESSAGES:
        for field, value in message_of(request).ListFields():
            if option := options.get(field.name):
                yield option, value


def sampling_params(
    request: pb.GenerateRequest, defaults: GenerationDefaults = _NO_DEFAULTS
) -> SamplingParams:
    """Return how to decode and when to stop.

    Absent fields take the package's defaults, then the engine's.
    """
    without = frozenset(request.without_defaults)
    asked: dict[str, Any] = {"constraint": _constraint(request.decoding)}
    for option, value in named_options(request):
        if option.kind == "word":
            is_known = 1 <= value <= len(option.words)
            asked[option.field] = option.words[value - 1] if is_known else str(value)
        else:
            read = _READ.get(option.kind)
            asked[option.field] = read(value) if read else value
    if strategy := request.decoding.WhichOneof("strategy"):
        asked["strategy"] = strategy
    if strategy == "beam" and "beam_width" not in asked:
        if defaults.beam is None or without & {"beam", filling.ALL}:
            asked["beam_width"] = 0  # refused later
    return filling.sampling_params(asked, defaults, without)


def _constraint(decoding: pb.Decoding) -> Constraint | None:
    constraint = decoding.constraint
    match constraint.WhichOneof("kind"):
        case "json_schema":
            return Constraint("json_schema", (constraint.json_schema,))
        case "regex":
            return Constraint("regex", (constraint.regex,))
        case "grammar":
            return Constraint("grammar", (constraint.grammar,))
        case "choice":
            return Constraint("choice", tuple(constraint.choice.values))
        case _:
            return None
