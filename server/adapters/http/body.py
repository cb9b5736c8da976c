"""Reads the body of a request, as long as bounds allow, into a pydantic model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import islice
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from engine.wording import shortened
from server.adapters.config import HttpConfig
from server.adapters.http.errors import HttpError
from server.adapters.http.requests import ModelRequest

RequestT = TypeVar("RequestT", bound=ModelRequest)
ModelT = TypeVar("ModelT", bound=BaseModel)
_MAX_FAULTS = 5  # named in an answer
_MAX_UNKNOWN = 256  # fields of a request that are looked at


async def parsed(request: Request, model: type[RequestT], config: HttpConfig) -> RequestT:
    """Return the body as a model; HttpError for one that is too long, too slow or wrong."""
    asked = validated(model, await read_body(request, config))
    if len(asked.extra) > _MAX_UNKNOWN:
        raise HttpError(
            400, f"it has {len(asked.extra):,} fields that are not known; leave them out"
        )
    if faults := list(islice(asked.faults(), _MAX_FAULTS)):
        raise _refusal(faults)
    return asked


async def read_body(request: Request, config: HttpConfig) -> bytes:
    """Return the body; HttpError for one that is too long or too slow."""
    try:
        async with asyncio.timeout(config.body_seconds):
            return await _read(request, config.max_body_bytes)
    except TimeoutError as error:
        message = f"the body did not come within {config.body_seconds:g} seconds"
        raise HttpError(408, message) from error
    except ClientDisconnect as error:
        raise HttpError(400, "the body ended early") from error


def validated(model: type[ModelT], body: bytes) -> ModelT:
    """Return JSON as a model; HttpError for a wrong one."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _refusal([_fault(*one["loc"], what=one["msg"]) for one in error.errors()]) from error


async def _read(request: Request, max_bytes: int) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise HttpError(
                413,
                f"the body has more than {max_bytes:,} bytes; send less in a request, or start "
                "the server with a larger max_body_bytes ([http] of --config)",
            )
    return bytes(body)


def _fault(*place: int | str, what: str) -> tuple[str | None, str]:
    """Return the field that pydantic finds wrong, and what it says of it."""
    what = what.removeprefix("Value error, ")
    if not place:
        return None, what
    name, *inner = place
    keys = [f"[{one}]" if isinstance(one, int) else f".{one}" for one in inner if one != "[key]"]
    return str(name), f"{shortened(name)}{shortened(''.join(keys))}: {what}"


def _refusal(faults: Sequence[tuple[str | None, str]]) -> HttpError:
    """Return the answer that names the wrong fields."""
    field = faults[0][0]
    said = "; ".join(what for _, what in faults[:_MAX_FAULTS])
    return HttpError(400, said, param=field and field.partition(".")[0])
