"""Turns the protocol's requests into the engine's, naming every wrong field and missing feature."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace

from tokenweir.v1 import common_pb2, generation_service_pb2, prediction_service_pb2

from engine.errors import CapabilityNotSupported, FieldViolation, InvalidRequest
from engine.package import Manifest
from engine.prediction import PredictionItem
from engine.request import (
    GenerationRequest,
    RequestLimits,
    SamplingParams,
    check_sampling_params,
    raise_if_any,
)

MAX_REQUEST_ID_CHARS = 128
MAX_TOKENS_PER_MESSAGE = 1024


def generation_requests(
    request: generation_service_pb2.GenerateRequest,
    *,
    manifest: Manifest,
    limits: RequestLimits,
    request_ids: Iterator[str],
    deadline: float | None,
) -> list[GenerationRequest]:
    """Return one engine request per input, in order.

    `request_ids` gives the engine's names of them. Raises CapabilityNotSupported for options that
    this server does not have, and InvalidRequest for everything else that is wrong.
    """
    raise_if_unsupported(_unsupported_generation(request, manifest))
    if not 1 <= len(request.inputs) <= limits.max_inputs:  # before any of them is looked at
        raise_if_any([_wrong_count("inputs", len(request.inputs), limits.max_inputs)])
    assert manifest.generation is not None
    params = sampling_params(request)
    violations = check_sampling_params(
        params, limits=limits, vocab_size=manifest.generation.vocab_size
    )
    violations += _check_request_id(request.request_id)
    violations += _check_inputs(request.inputs)
    raise_if_any(violations)
    if params.strategy == "sampling" and params.seed is None:
        params = replace(params, seed=secrets.randbits(64))  # one for all inputs, see Provenance
    return [
        GenerationRequest(
            request_id=next(request_ids),
            prompt=one.text if one.HasField("text") else tuple(one.tokens.ids),
            params=params,
            deadline=deadline,
            input_path=f"inputs[{i}]",
        )
        for i, one in enumerate(request.inputs)
    ]


def sampling_params(request: generation_service_pb2.GenerateRequest) -> SamplingParams:
    """Return how to decode and when to stop; absent fields take the engine's defaults."""
    decoding, stopping = request.decoding, request.stopping
    default = SamplingParams()
    sampling = decoding.sampling
    return SamplingParams(
        strategy="sampling" if decoding.WhichOneof("strategy") == "sampling" else "greedy",
        temperature=sampling.temperature
        if sampling.HasField("temperature")
        else default.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else default.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed if sampling.HasField("seed") else None,
        num_outputs=decoding.num_outputs if decoding.HasField("num_outputs") else 1,
        max_new_tokens=stopping.max_new_tokens if stopping.HasField("max_new_tokens") else None,
        min_new_tokens=stopping.min_new_tokens,
        stop_strings=tuple(stopping.strings),
        stop_token_ids=tuple(stopping.token_ids),
        include_stop=stopping.include_stop,
        ignore_eos=stopping.ignore_eos,
    )


def check_stream_request(request: generation_service_pb2.GenerateStreamRequest) -> int:
    """Return the tokens per message; raise for what is wrong outside of `request.request`."""
    if request.HasField("resume_after"):
        raise_if_unsupported(["resume_after"])
    violations = []
    tokens = request.tokens_per_message if request.HasField("tokens_per_message") else 1
    if not 1 <= tokens <= MAX_TOKENS_PER_MESSAGE:
        violations.append(
            FieldViolation(
                "tokens_per_message", f"{tokens} is outside 1 to {MAX_TOKENS_PER_MESSAGE}"
            )
        )
    if len(request.request.inputs) != 1:
        violations.append(
            FieldViolation(
                "request.inputs",
                f"{len(request.request.inputs)} inputs; a stream takes exactly one, "
                "Generate takes several",
            )
        )
    raise_if_any(violations)
    return tokens


def nested_under(path: str, error: InvalidRequest) -> InvalidRequest:
    """Return the error with its fields named from one level further out."""
    return InvalidRequest(
        [FieldViolation(f"{path}.{v.field}", v.description) for v in error.violations]
    )


def prediction_items(
    items: Sequence[prediction_service_pb2.Item], request_id: str, limits: RequestLimits
) -> list[PredictionItem]:
    """Return the items; the engine checks their contents, this only what it could not see."""
    if not 1 <= len(items) <= limits.max_inputs:
        raise_if_any([_wrong_count("items", len(items), limits.max_inputs)])
    violations = _check_request_id(request_id)
    violations += [
        FieldViolation(f"items[{i}]", "it is empty; set text, tokens or image")
        for i, item in enumerate(items)
        if item.WhichOneof("kind") is None
    ]
    raise_if_any(violations)
    return [_prediction_item(item) for item in items]


def is_request_id(text: str) -> bool:
    """Say whether a client may call its request so; every other id stays out of logs, too."""
    return len(text) <= MAX_REQUEST_ID_CHARS and text.isprintable()


def raise_if_unsupported(features: Sequence[str]) -> None:
    """Raise CapabilityNotSupported if a feature is asked for that this server does not have."""
    if features:
        raise CapabilityNotSupported(
            f"{', '.join(features)}: not supported by this model on this server; leave it out "
            "(ListModels tells the capabilities of a model)",
            features,
        )


def _prediction_item(item: prediction_service_pb2.Item) -> PredictionItem:
    content: str | bytes | tuple[int, ...]
    match item.WhichOneof("kind"):
        case "text":
            content = item.text
        case "image":
            content = item.image
        case _:
            content = tuple(item.tokens.ids)
    return PredictionItem(content, item.text_pair if item.HasField("text_pair") else None)


def _wrong_count(path: str, count: int, most: int) -> FieldViolation:
    return FieldViolation(path, f"{count} of them are outside 1 to {most}")


def _check_request_id(request_id: str) -> list[FieldViolation]:
    if is_request_id(request_id):
        return []
    return [
        FieldViolation(
            "request_id",
            f"it must be at most {MAX_REQUEST_ID_CHARS} printable characters; send a UUID",
        )
    ]


def _check_inputs(inputs: Sequence[generation_service_pb2.Input]) -> list[FieldViolation]:
    return [
        FieldViolation(f"inputs[{i}]", "it is empty; set text or tokens")
        for i, one in enumerate(inputs)
        if one.WhichOneof("kind") is None
    ]


def _unsupported_generation(
    request: generation_service_pb2.GenerateRequest, manifest: Manifest
) -> list[str]:
    """Return the paths of everything asked for that this server does not have."""
    decoding, output, scheduling = request.decoding, request.output, request.scheduling
    sampling = decoding.sampling
    num_outputs = decoding.num_outputs if decoding.HasField("num_outputs") else 1
    asked = {
        "decoding.beam": decoding.WhichOneof("strategy") == "beam",
        "decoding.sampling.typical_p": sampling.HasField("typical_p") and sampling.typical_p != 1,
        "decoding.sampling.best_of": sampling.HasField("best_of")
        and sampling.best_of != num_outputs,
        "decoding.constraint": decoding.HasField("constraint"),
        "output.logprobs": output.HasField("logprobs"),
        "output.prompt_logprobs": output.HasField("prompt_logprobs"),
        "output.alignment": output.alignment,
        "output.allow_partial": output.allow_partial,
        "scheduling.priority": scheduling.priority != 0,
        "scheduling.tenant": bool(scheduling.tenant),
        "scheduling.adapter": bool(scheduling.adapter),
        "scheduling.determinism": not _is_honoured(scheduling.determinism, manifest),
    }
    unsupported = [path for path, is_asked in asked.items() if is_asked]
    unsupported += _unsupported_controls(decoding.controls)
    unsupported += [
        f"inputs[{i}].{one.WhichOneof('target_prefix')}"
        for i, one in enumerate(request.inputs)
        if one.WhichOneof("target_prefix")
    ]
    unsupported += [f"extensions.{name}" for name in request.extensions.fields]
    return unsupported


def _unsupported_controls(controls: generation_service_pb2.LogitControls) -> list[str]:
    """Return the controls that are set to something else than "none"."""
    asked = {
        "repetition_penalty": controls.HasField("repetition_penalty")
        and controls.repetition_penalty != 1,
        "frequency_penalty": controls.frequency_penalty != 0,
        "presence_penalty": controls.presence_penalty != 0,
        "no_repeat_ngram": controls.no_repeat_ngram != 0,
        "logit_bias": bool(controls.logit_bias),
        "banned_tokens": bool(controls.banned_tokens),
    }
    return [f"decoding.controls.{name}" for name, is_asked in asked.items() if is_asked]


def _is_honoured(determinism: common_pb2.Determinism.ValueType, manifest: Manifest) -> bool:
    if determinism == common_pb2.DETERMINISM_BATCH_INVARIANT:
        return manifest.certificate.batch_invariant
    return determinism in (
        common_pb2.DETERMINISM_UNSPECIFIED,
        common_pb2.DETERMINISM_BEST_EFFORT,
    )
