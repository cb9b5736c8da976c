"""How to decode a request: worked out once for all requests that ask the same of their inputs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from tokenweir.v1 import generation_service_pb2 as pb

from engine.config import RequestLimits
from engine.errors import FieldViolation
from engine.package.manifest import Manifest
from engine.requests.checks import raise_if_any
from engine.requests.request import SamplingParams
from server.worker.checks import (
    check_count,
    check_generation,
    check_inputs,
    check_num_ids,
    check_sizes,
    wrong_fields,
    wrong_inputs,
)
from server.worker.params import sampling_params

_MAX_BYTES = 1 << 14  # larger requests are not looked for: a mebibyte has room for half a million
_MAX_OPTIONS = 256  # most that are remembered

_Key = tuple[bytes, Collection[str]]


class KnownOptions:
    """Options of requests that were in order, and what they come to; of a worker's models.

    Most requests of a client differ in their inputs only, and to look at all that they might have
    asked takes as long as everything else before the engine.
    """

    def __init__(self) -> None:
        self._params: OrderedDict[_Key, SamplingParams] = OrderedDict()

    def params(
        self,
        request: pb.GenerateRequest,
        manifest: Manifest,
        capabilities: tuple[str, ...],
        limits: RequestLimits,
    ) -> SamplingParams:
        """Return how to decode.

        Raises CapabilityNotSupported for options that are not among the model's capabilities, and
        InvalidRequest for everything else that is wrong with them.
        """
        if request.ByteSize() > _MAX_BYTES:
            return _checked_params(request, manifest, capabilities, limits)
        options = pb.GenerateRequest()  # without what is the request's own
        options.CopyFrom(request)
        options.ClearField("inputs")
        options.ClearField("request_id")
        key = options.SerializeToString(), capabilities
        if (params := self._params.get(key)) is None:
            params = _checked_params(request, manifest, capabilities, limits)
            self._params[key] = params
            if len(self._params) > _MAX_OPTIONS:
                self._params.popitem(last=False)
            return params
        assert manifest.generation is not None
        check_count("inputs", len(request.inputs), limits)
        check_num_ids(request.inputs, manifest.generation)
        check_inputs(request.inputs, capabilities)
        raise_if_any(wrong_inputs(request))
        return params


def _checked_params(
    request: pb.GenerateRequest,
    manifest: Manifest,
    capabilities: Collection[str],
    limits: RequestLimits,
) -> SamplingParams:
    assert manifest.generation is not None
    # Counted before any of them is looked at.
    check_sizes(request, manifest.generation, limits)
    check_generation(request, capabilities)
    params = sampling_params(request, manifest.defaults)
    found = wrong_fields(request, params, manifest.generation, limits)
    if found and manifest.defaults.given:  # they may have made it wrong
        own = wrong_fields(request, sampling_params(request), manifest.generation, limits)
        hint = "; defaults of the package hold here: name the option, or its default to leave away"
        found = [
            v if v in own else FieldViolation(v.field, f"{v.description}{hint}") for v in found
        ]
    raise_if_any(found)
    return params
