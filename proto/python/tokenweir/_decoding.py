"""Turns the options of a generation into the protocol's Decoding, Stopping, Output, Scheduling."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tokenweir._mapping import set_field, set_fields, token_ids
from tokenweir.v1 import common_pb2
from tokenweir.v1 import generation_service_pb2 as pb

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", "best_of")
_BEAM = ("beam", "length_penalty", "length_penalty_form", "beam_end", "renormalize")
_BELONG_TO = {name: "sampling" for name in _SAMPLING} | {name: "beam" for name in _BEAM}
_STRATEGIES = ("greedy", "sampling", "beam")
_CONSTRAINTS = ("json_schema", "regex", "grammar", "choice")
_LISTS = ("banned_tokens", "banned_sequences", "begin_banned_tokens", "forced_begin")
_CONTROLS = (
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "no_repeat_ngram",
    "encoder_no_repeat_ngram",
    "logit_bias",
    "banned_tokens",
    "begin_banned_tokens",
    "allowed_token_ids",
)


def decoding(options: Mapping[str, object]) -> pb.Decoding:
    """Return how the next token is chosen; raises ValueError for options that exclude another."""
    message = pb.Decoding()
    match _strategy(options):
        case "sampling":
            message.sampling.SetInParent()
            set_fields(message.sampling, options, *_SAMPLING)
        case "beam":
            message.beam.SetInParent()
            set_fields(
                message.beam, options, "length_penalty", "length_penalty_form", "renormalize"
            )
            set_field(message.beam, "width", options.get("beam"), "beam")
            set_field(message.beam, "end", options.get("beam_end"), "beam_end")
        case "greedy":
            message.greedy.SetInParent()
    set_fields(message, options, "num_outputs", "forced_begin", "forced_end")
    _fill_controls(message, options)
    _fill_constraint(message, options)
    return message


def stopping(options: Mapping[str, object]) -> pb.Stopping:
    """Return when to stop."""
    message = pb.Stopping()
    set_fields(message, options, "max_new_tokens", "min_new_tokens", "include_stop", "ignore_eos")
    stop = options.get("stop")
    set_field(message, "strings", [stop] if isinstance(stop, str) else stop, "stop")
    set_field(message, "token_ids", options.get("stop_token_ids"), "stop_token_ids")
    return message


def output(options: Mapping[str, object]) -> pb.Output:
    """Return what to return; token ids always."""
    message = pb.Output(token_ids=True)
    names = "logprobs", "prompt_logprobs", "alignment", "allow_partial", "skip_special_tokens"
    set_fields(message, options, *names)
    set_field(message, "prompt_tokens", options.get("prompt_token_ids"), "prompt_token_ids")
    return message


def scheduling(options: Mapping[str, object]) -> pb.Scheduling:
    """Return when and how exactly to run."""
    message = pb.Scheduling()
    set_fields(message, options, "priority", "tenant")
    if options.get("batch_invariant") is not None:
        message.determinism = (
            common_pb2.DETERMINISM_BATCH_INVARIANT
            if options["batch_invariant"]
            else common_pb2.DETERMINISM_BEST_EFFORT
        )
    return message


def set_without_defaults(request: pb.GenerateRequest, options: Mapping[str, object]) -> None:
    """Name the defaults that do not hold: those given, and those of empty lists."""
    given = options.get("without_defaults")
    if isinstance(given, str):
        raise ValueError(f"without_defaults={given!r} is one name; give a list of them")
    set_field(request, "without_defaults", given)
    request.without_defaults.extend(name for name in _LISTS if _is_empty(options.get(name)))


def _is_empty(value: object) -> bool:
    return isinstance(value, Sequence) and not value


def _strategy(options: Mapping[str, object]) -> str | None:
    """Return the strategy that is named, or else the one that the other options imply, if any."""
    given = [name for name in _BELONG_TO if options.get(name) is not None]
    implied = {_BELONG_TO[name] for name in given}
    if len(implied) > 1:
        raise ValueError(f"{', '.join(given)}: give options of sampling or of beam search only")
    strategy = options.get("strategy") or (implied.pop() if implied else None)
    if strategy is None:
        return None
    if strategy not in _STRATEGIES:
        raise ValueError(f"strategy={strategy!r} must be one of {', '.join(_STRATEGIES)}")
    wrong = [name for name in given if _BELONG_TO[name] != strategy]
    if wrong:
        raise ValueError(f"{', '.join(wrong)} mean nothing with strategy={strategy!r}")
    return str(strategy)


def _fill_controls(message: pb.Decoding, options: Mapping[str, object]) -> None:
    runs = options.get("banned_sequences")
    if runs is None and all(options.get(name) is None for name in _CONTROLS):
        return
    set_fields(message.controls, options, *_CONTROLS)
    if runs is not None:
        ids = [token_ids(run, "banned_sequences") for run in runs]  # type: ignore[attr-defined]
        message.controls.banned_sequences.extend(ids)


def _fill_constraint(message: pb.Decoding, options: Mapping[str, object]) -> None:
    given = [name for name in _CONSTRAINTS if options.get(name) is not None]
    if len(given) > 1:
        raise ValueError(f"{', '.join(given)}: give one of them only")
    for name in given:
        value = options[name]
        if name == "choice":
            if isinstance(value, str):
                raise ValueError(f"choice={value!r} is one text; give a list of them")
            message.constraint.choice.SetInParent()
            set_field(message.constraint.choice, "values", value, name)
        else:
            text = json.dumps(value) if isinstance(value, Mapping) else value
            set_field(message.constraint, name, text)
