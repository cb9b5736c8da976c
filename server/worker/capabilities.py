"""Says which capability of a model each option of a request needs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from tokenweir.v1 import common_pb2, generation_service_pb2

from engine.errors import CapabilityNotSupported
from server.worker.params import named_options

BATCH_INVARIANT = "batch_invariant"
_NOWHERE = ""  # the capability of what no engine has
_MAX_NAMED_EXTENSIONS = 8  # in one answer


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
