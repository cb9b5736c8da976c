"""Reads the body of a request, as long as bounds allow, into a pydantic model."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from server.front_config import HttpConfig
from server.http.errors import HttpError

ModelT = TypeVar("ModelT", bound=BaseModel)
_MAX_FAULTS = 5  # named in an answer


async def parsed(request: Request, model: type[ModelT], config: HttpConfig) -> ModelT:
    """Return the body as a model; HttpError for one that is too long, too slow or wrong."""
    try:
        async with asyncio.timeout(config.body_seconds):
            body = await _read(request, config.max_body_bytes)
    except TimeoutError as error:
        message = f"the body did not come within {config.body_seconds:g} seconds"
        raise HttpError(408, message) from error
    except ClientDisconnect as error:
        raise HttpError(400, "the body ended early") from error
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _wrong(error) from error


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


def _wrong(error: ValidationError) -> HttpError:
    """Return the answer that names the wrong fields."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    places = [".".join(map(str, fault["loc"])) for fault in faults]
    said = [
        f"{place}: {fault['msg']}" if place else fault["msg"]
        for place, fault in zip(places, faults, strict=True)
    ]
    param = str(faults[0]["loc"][0]) if faults[0]["loc"] else None
    return HttpError(400, "; ".join(said[:_MAX_FAULTS]), param=param)
