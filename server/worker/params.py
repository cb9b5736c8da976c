"""Reads from a request how to decode, and when to stop."""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message
from tokenweir.v1 import generation_service_pb2 as pb

from engine.requests.request import BeamEnd, Constraint, LogitControls, SamplingParams

BEAM_ENDS: dict[int, BeamEnd] = {
    pb.BEAM_END_BOUND: "bound",
    pb.BEAM_END_ESTIMATE: "estimate",
    pb.BEAM_END_ENOUGH: "enough",
    pb.BEAM_END_LIMIT: "limit",
}


def sampling_params(request: pb.GenerateRequest) -> SamplingParams:
    """Return how to decode and when to stop; absent fields take the engine's defaults."""
    decoding, stopping, output = request.decoding, request.stopping, request.output
    sampling, beam = decoding.sampling, decoding.beam
    asked: dict[str, Any] = {
        **_present(sampling, "temperature", "top_k", "top_p", "min_p", "typical_p"),
        **_present(sampling, "seed", "best_of"),
        **_present(beam, "length_penalty", "length_power"),
        **_present(decoding, "num_outputs", "forced_end"),
        **_present(stopping, "max_new_tokens", "min_new_tokens"),
        **_present(output, "logprobs", "prompt_logprobs"),
    }
    strategy = decoding.WhichOneof("strategy") or "greedy"
    if strategy == "beam":
        asked |= {"beam_width": beam.width, **_beam_end(beam)}
    return SamplingParams(
        strategy=strategy,
        forced_begin=tuple(decoding.forced_begin),
        controls=_controls(decoding.controls),
        constraint=_constraint(decoding),
        alignment=output.alignment,
        allow_partial=output.allow_partial,
        stop_strings=tuple(stopping.strings),
        stop_token_ids=tuple(stopping.token_ids),
        include_stop=stopping.include_stop,
        ignore_eos=stopping.ignore_eos,
        **asked,
    )


def _present(message: Message, *names: str) -> dict[str, Any]:
    """Return the fields that are set; the others are to keep their defaults."""
    return {name: getattr(message, name) for name in names if message.HasField(name)}


def _beam_end(beam: pb.BeamSearch) -> dict[str, Any]:
    if beam.end:
        return {"beam_end": BEAM_ENDS.get(beam.end, str(beam.end))}
    if beam.HasField("early_stop"):
        return {"beam_end": "bound" if beam.early_stop else "limit"}
    return {}


def _controls(controls: pb.LogitControls) -> LogitControls:
    penalties = _present(
        controls,
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "no_repeat_ngram",
        "encoder_no_repeat_ngram",
    )
    return LogitControls(
        logit_bias=tuple(sorted(controls.logit_bias.items())),
        banned_tokens=tuple(controls.banned_tokens),
        banned_sequences=tuple(tuple(run.ids) for run in controls.banned_sequences),
        begin_banned_tokens=tuple(controls.begin_banned_tokens),
        **penalties,
    )


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
