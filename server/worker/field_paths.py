"""The paths of fields in errors, where a whole request is a field of another one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from tokenweir.v1 import generation_service_pb2

from engine.errors import CapabilityNotSupported, FieldViolation, InvalidRequest


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
