"""Faults of a message that show before an engine sees it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tokenweir.v1 import generation_service_pb2

from engine.config import RequestLimits
from engine.errors import CapabilityNotSupported, FieldViolation, InvalidRequest
from engine.package.manifest import GenerationContract
from engine.requests.checks import check_logprobs, check_sampling_params, raise_if_any
from engine.requests.defaults import ALL
from engine.requests.generation_defaults import GenerationDefaults
from engine.requests.request import SamplingParams
from server.calls.request_ids import MAX_REQUEST_ID_CHARS, is_request_id
from server.worker.params import named_options

MAX_TENANT_CHARS = 128
MAX_NAME_CHARS = 32  # a wrong name is repeated up to here
_NOT_SCORED = "a conversation is continued, not scored; give its text or tokens"


def check_count(path: str, count: int, limits: RequestLimits) -> None:
    """Raise InvalidRequest for none of something, or more than a call may have."""
    if not 1 <= count <= limits.max_inputs:
        hint = "divide them between calls" if count else "send at least one"
        what = f"{count} of them are outside 1 to {limits.max_inputs}; {hint}"
        raise_if_any([FieldViolation(path, what)])


def check_sizes(
    request: generation_service_pb2.GenerateRequest,
    contract: GenerationContract,
    limits: RequestLimits,
) -> None:
    """Raise InvalidRequest for lists that are too long, before anybody looks at what is in them."""
    check_count("inputs", len(request.inputs), limits)
    choices = request.decoding.constraint.choice.values
    sizes = [("decoding.constraint.choice", len(choices), limits.max_choices)]
    for option, values in named_options(request):
        if isinstance(option.bounds, str) and option.bounds:
            most = getattr(limits, option.bounds)
            sizes.append((option.path, len(values), most))
            if option.kind == "runs":
                sizes.append((option.path, sum(len(run.ids) for run in values[:most]), most))
    raise_if_any(
        [
            FieldViolation(path, f"{count} of them are more than {most}; send fewer")
            for path, count, most in sizes
            if count > most
        ]
    )
    check_num_ids(request.inputs, contract)


def check_num_ids(
    inputs: Sequence[generation_service_pb2.Input], contract: GenerationContract
) -> None:
    """Raise InvalidRequest for more token ids than any sequence has; the engine counts exactly."""
    most = max(shape.max_len for shape in (contract.cache, contract.cross_cache) if shape)
    raise_if_any(
        [
            FieldViolation(
                f"inputs[{i}].{name}",
                f"{len(ids)} tokens are more than {most}, the longest of this model; shorten it",
            )
            for i, one in enumerate(inputs)
            for name, ids in (("tokens", one.tokens.ids), ("prefix_tokens", one.prefix_tokens.ids))
            if len(ids) > most and (name != "tokens" or not one.HasField("truncate_prompt_tokens"))
        ]
    )


def wrong_fields(
    request: generation_service_pb2.GenerateRequest,
    params: SamplingParams,
    contract: GenerationContract,
    limits: RequestLimits,
) -> list[FieldViolation]:
    """Return what is wrong with a generation, and can be said without the model."""
    return [
        *check_sampling_params(
            params,
            limits=limits,
            vocab_size=contract.vocab_size,
            has_encoder=contract.cross_cache is not None,
        ),
        *wrong_inputs(request),
        *_empty_constraint(request.decoding),
        *_unknown_defaults(request.without_defaults),
        *_wrong_tenant(request.scheduling.tenant),
    ]


def wrong_inputs(request: generation_service_pb2.GenerateRequest) -> list[FieldViolation]:
    """Return what of that is in the request's inputs, or its id."""
    return [*wrong_request_id(request.request_id), *_empty_inputs(request.inputs)]


def wrong_fields_of_score(
    request: generation_service_pb2.ScoreRequest, limits: RequestLimits
) -> list[FieldViolation]:
    """Return what is wrong with a score."""
    return [
        *check_logprobs(request.top_logprobs, "top_logprobs", limits),
        *wrong_request_id(request.request_id),
        *_empty_inputs(request.inputs),
        *(
            FieldViolation(f"inputs[{i}].chat", _NOT_SCORED)
            for i, one in enumerate(request.inputs)
            if one.HasField("chat")
        ),
        *(
            FieldViolation(f"inputs[{i}].{name}", "it is not for scores; leave it out")
            for i, one in enumerate(request.inputs)
            for name in ("truncate_prompt_tokens", "add_special_tokens")
            if one.HasField(name)
        ),
        *(
            FieldViolation(
                f"inputs[{i}]", "it has no target to score; set prefix_text or prefix_tokens"
            )
            for i, one in enumerate(request.inputs)
            if one.WhichOneof("target_prefix") is None
        ),
        *_wrong_tenant(request.scheduling.tenant),
    ]


def wrong_request_id(request_id: str) -> list[FieldViolation]:
    """Return what is wrong with the id that a client gave."""
    if is_request_id(request_id):
        return []
    return [
        FieldViolation(
            "request_id",
            f"it must be at most {MAX_REQUEST_ID_CHARS} printable characters; send a UUID",
        )
    ]


def _empty_inputs(inputs: Sequence[generation_service_pb2.Input]) -> list[FieldViolation]:
    found = []
    for i, one in enumerate(inputs):
        if one.WhichOneof("kind") is None:
            found.append(FieldViolation(f"inputs[{i}]", "it is empty; set text or tokens"))
        if one.HasField("chat") and not one.chat.messages:
            found.append(FieldViolation(f"inputs[{i}].chat.messages", "give at least one"))
    return found


def _empty_constraint(decoding: generation_service_pb2.Decoding) -> list[FieldViolation]:
    if decoding.HasField("constraint") and decoding.constraint.WhichOneof("kind") is None:
        return [FieldViolation("decoding.constraint", "it is empty; set one kind, or leave it out")]
    return []


def _unknown_defaults(names: Sequence[str]) -> list[FieldViolation]:
    return [
        FieldViolation(
            f"without_defaults[{i}]",
            f"{name[:MAX_NAME_CHARS]!a} is not an option that a package can have a default of; "
            f'those are {", ".join(GenerationDefaults.model_fields)}, and "{ALL}" is all',
        )
        for i, name in enumerate(names)
        if name != ALL and name not in GenerationDefaults.model_fields
    ][:1]


def _wrong_tenant(tenant: str) -> list[FieldViolation]:
    if len(tenant) <= MAX_TENANT_CHARS and tenant.isprintable():
        return []
    what = f"it must be at most {MAX_TENANT_CHARS} printable characters"
    return [FieldViolation("scheduling.tenant", what)]


@contextmanager
def nested_in(path: str) -> Iterator[None]:
    """Name the fields of a GenerateRequest, in errors raised inside, from one level further out."""
    try:
        yield
    except InvalidRequest as error:
        raise InvalidRequest(
            [FieldViolation(f"{path}.{v.field}", v.description) for v in error.violations]
        ) from error
    except CapabilityNotSupported as error:
        fields = generation_service_pb2.GenerateRequest.DESCRIPTOR.fields_by_name
        features = [
            f"{path}.{name}" if re.split(r"[.[]", name)[0] in fields else name
            for name in error.features  # not all are paths
        ]
        message = str(error).replace(", ".join(error.features), ", ".join(features), 1)
        raise CapabilityNotSupported(message, features) from error
