"""Reads from a request how to decode, and when to stop."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message
from tokenweir.v1 import generation_service_pb2 as pb

from engine.requests import defaults as filling
from engine.requests.generation_defaults import GenerationDefaults
from engine.requests.request import BeamEnd, Constraint, SamplingParams

BEAM_ENDS: dict[int, BeamEnd] = {
    pb.BEAM_END_BOUND: "bound",
    pb.BEAM_END_ESTIMATE: "estimate",
    pb.BEAM_END_ENOUGH: "enough",
    pb.BEAM_END_LIMIT: "limit",
}
_NO_DEFAULTS = GenerationDefaults()


def sampling_params(
    request: pb.GenerateRequest, defaults: GenerationDefaults = _NO_DEFAULTS
) -> SamplingParams:
    """Return how to decode and when to stop.

    Absent fields take the package's defaults, then the engine's.
    """
    without = frozenset(request.without_defaults)
    asked = {
        **_of_decoding(request.decoding),
        **_of_controls(request.decoding.controls),
        **_of_the_end(request.stopping, request.output),
    }
    if asked.get("strategy") == "beam" and not request.decoding.beam.width:
        asked.pop("beam_width")
        if defaults.beam is None or without & {"beam", filling.ALL}:
            asked["beam_width"] = 0  # which is refused
    return filling.sampling_params(asked, defaults, without)


def _of_decoding(decoding: pb.Decoding) -> dict[str, Any]:
    sampling, beam = decoding.sampling, decoding.beam
    asked = {
        **_present(sampling, "temperature", "top_k", "top_p", "min_p", "typical_p"),
        **_present(sampling, "seed", "best_of"),
        **_present(beam, "length_penalty", "length_power", "renormalize"),
        **_present(decoding, "num_outputs", "forced_end"),
        **_lists(decoding, "forced_begin"),
        "constraint": _constraint(decoding),
    }
    strategy = decoding.WhichOneof("strategy")
    if strategy is not None:
        asked["strategy"] = strategy
    if strategy == "beam":
        asked["beam_width"] = beam.width
        if beam.end:
            asked["beam_end"] = BEAM_ENDS.get(beam.end, str(beam.end))
    return asked


def _of_controls(controls: pb.LogitControls) -> dict[str, Any]:
    asked = {
        **_present(controls, "repetition_penalty", "frequency_penalty", "presence_penalty"),
        **_present(controls, "no_repeat_ngram", "encoder_no_repeat_ngram"),
        **_lists(controls, "banned_tokens", "begin_banned_tokens"),
    }
    if controls.logit_bias:
        asked["logit_bias"] = tuple(sorted(controls.logit_bias.items()))
    if controls.banned_sequences:
        asked["banned_sequences"] = tuple(tuple(run.ids) for run in controls.banned_sequences)
    return asked


def _of_the_end(stopping: pb.Stopping, output: pb.Output) -> dict[str, Any]:
    return {
        **_present(stopping, "max_new_tokens", "min_new_tokens"),
        **_present(output, "logprobs", "prompt_logprobs", "skip_special_tokens"),
        "alignment": output.alignment,
        "allow_partial": output.allow_partial,
        "stop_strings": tuple(stopping.strings),
        "stop_token_ids": tuple(stopping.token_ids),
        "include_stop": stopping.include_stop,
        "ignore_eos": stopping.ignore_eos,
    }


def _present(message: Message, *names: str) -> dict[str, Any]:
    """Return the fields that are set; the others are to keep their defaults."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _lists(message: Message, *names: str) -> dict[str, Any]:
    """Return the lists that are not empty; the others are to keep their defaults."""
    return {name: tuple(getattr(message, name)) for name in names if getattr(message, name)}


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
