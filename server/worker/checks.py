"""Faults of a message that show before an engine sees it."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

from tokenweir.v1 import common_pb2, generation_service_pb2

from engine.config import RequestLimits
from engine.errors import CapabilityNotSupported, FieldViolation, InvalidRequest
from engine.package.manifest import GenerationContract
from engine.requests.checks import check_logprobs, check_sampling_params, raise_if_any
from engine.requests.defaults import ALL
from engine.requests.generation_defaults import GenerationDefaults
from engine.requests.request import SamplingParams
from server.calls.request_ids import MAX_REQUEST_ID_CHARS, is_request_id
from server.worker.params import named_options

BATCH_INVARIANT = "batch_invariant"
_NOWHERE = ""  # the capability of what no engine has
_MAX_NAMED_EXTENSIONS = 8  # in one answer
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


def check_generation(
    request: generation_service_pb2.GenerateRequest, capabilities: Collection[str]
) -> None:
    """Raise CapabilityNotSupported for everything asked for that the model does not have."""
    raise_if_unsupported(
        [path for path, capability in _asked(request) if capability not in capabilities]
    )


def check_inputs(
    inputs: Sequence[generation_service_pb2.Input], capabilities: Collection[str]
) -> None:
    """Do the same for the inputs alone."""
    raise_if_unsupported(
        [path for path, name in _asked_of_inputs(inputs) if name not in capabilities]
    )


def check_scoring(
    request: generation_service_pb2.ScoreRequest, capabilities: Collection[str]
) -> None:
    """Do the same for what is asked of a score."""
    asked = _asked_of_scheduling(request.scheduling)
    raise_if_unsupported([path for path, name in asked if name not in capabilities])


def raise_if_unsupported(features: Sequence[str]) -> None:
    """Raise CapabilityNotSupported if a feature is asked for that this server does not have."""
    if features:
        raise CapabilityNotSupported(
            f"{', '.join(features)}: not supported by this model on this server; leave it out "
            "(ListModels tells the capabilities of a model)",
            features,
        )


def _asked(request: generation_service_pb2.GenerateRequest) -> Iterator[tuple[str, str]]:
    """Yield the path of every option that is asked for, and the capability that it needs.

    An option that is set to "none" is not asked for.
    """
    yield from _asked_of_options(request)
    yield from _asked_of_scheduling(request.scheduling)
    yield from _asked_of_inputs(request.inputs)
    for name in islice(request.extensions.fields, _MAX_NAMED_EXTENSIONS):
        yield f"extensions.{name}", _NOWHERE


def _asked_of_inputs(
    inputs: Sequence[generation_service_pb2.Input],
) -> Iterator[tuple[str, str]]:
    for i, one in enumerate(inputs):
        if one.HasField("chat"):
            yield f"inputs[{i}].chat", "chat"
        if prefix := one.WhichOneof("target_prefix"):
            yield f"inputs[{i}].{prefix}", "target_prefix"


def _asked_of_options(
    request: generation_service_pb2.GenerateRequest,
) -> Iterator[tuple[str, str]]:
    decoding = request.decoding
    if decoding.WhichOneof("strategy") == "beam":
        yield "decoding.beam", "beam"
    for option, value in named_options(request):
        if not option.capability or value == option.default:
            continue
        num_outputs = decoding.num_outputs if decoding.HasField("num_outputs") else 1
        if option.name != "best_of" or value != num_outputs:
            yield option.path, option.capability
    if decoding.HasField("constraint"):
        if decoding.constraint.WhichOneof("kind") == "required_phrases":
            yield "decoding.constraint.required_phrases", _NOWHERE
        else:
            yield "decoding.constraint", "constraint"


def _asked_of_scheduling(
    scheduling: generation_service_pb2.Scheduling,
) -> Iterator[tuple[str, str]]:
    if scheduling.priority:
        yield "scheduling.priority", "priority"
    if scheduling.tenant:
        yield "scheduling.tenant", "fair_share"
    if scheduling.adapter:
        yield "scheduling.adapter", _NOWHERE
    if scheduling.determinism == common_pb2.DETERMINISM_BATCH_INVARIANT:
        yield "scheduling.determinism", BATCH_INVARIANT
    elif scheduling.determinism not in (
        common_pb2.DETERMINISM_UNSPECIFIED,
        common_pb2.DETERMINISM_BEST_EFFORT,
    ):
        yield "scheduling.determinism", _NOWHERE


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
