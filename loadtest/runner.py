"""Runs a load test: finds the model at the server, sends the requests, gathers what came out."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenweir import (
    AsyncClient,
    DeadlineExceeded,
    ModelInfo,
    NotSupported,
    TokenweirClientError,
    Unavailable,
)

from loadtest.errors import LoadTestError, NoServerError
from loadtest.metrics import LoadSummary, OwnLoad, RequestRecord, summarize
from loadtest.sender import Item, Progress, Sender
from loadtest.workload import LoadConfig

_METHODS = ("generate", "classify", "label", "embed")  # the first that the model has is used
_ASK_TIMEOUT = 10.0  # seconds for the server to say what it has; requests have their own


@dataclass(frozen=True)
class LoadReport:
    """A load test with all that was measured."""

    config: LoadConfig
    method: str  # the client's: "generate", streamed, or "classify", "label", "embed"
    started_at: datetime
    versions: Mapping[str, str]
    summary: LoadSummary
    records: tuple[RequestRecord, ...]  # by index
    own: OwnLoad | None = None
    interrupted: bool = False  # what was under way then is in no record
    command: str = ""
    commit: str = ""  # of the load test's code
    machine: str = ""  # that the load test ran on


def run(
    config: LoadConfig,
    progress: Progress | None = None,
    client_arguments: Mapping[str, Any] = MappingProxyType({}),
) -> LoadReport:
    """Run a load test to its end, or until Ctrl-C: then the report has what was answered so far.

    `client_arguments` are more of AsyncClient: credentials, a token. No report has them.
    Raise LoadTestError if no server answers, or if it does not serve the model; a request that
    fails is a record like any other.
    """
    # One attempt: a retry would hide a refusal from the statistics.
    connect = partial(AsyncClient, config.address, max_attempts=1, **client_arguments)
    return asyncio.run(_run(config, progress or (lambda done, total: None), connect))


async def _run(
    config: LoadConfig, progress: Progress, connect: Callable[..., AsyncClient]
) -> LoadReport:
    async with connect(timeout=_ASK_TIMEOUT) as client:
        model = await _find_model(client, config)
        versions = await _versions(client, model)
    async with connect(timeout=config.timeout) as client:
        method = _method(model)
        sender = Sender(client, config, method, _items(config, model), progress)
        await sender.warm_up()
        started_at = datetime.now(UTC)
        interrupted = await _sent_until_cancelled(sender)
        return LoadReport(
            config=config,
            method=method,
            started_at=started_at,
            versions=versions,
            summary=summarize(sender.records),
            records=sender.records,
            own=sender.own_load,
            interrupted=interrupted,
        )


async def _sent_until_cancelled(sender: Sender) -> bool:
    """Send all requests; say whether they were cut short after the first of them."""
    try:
        await sender.send_all()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or not sender.records:
            raise
        task.uncancel()  # what was measured is worth more than a quick end
        return True
    return False


async def _find_model(client: AsyncClient, config: LoadConfig) -> ModelInfo | None:
    """Return what the server says of the model; None if it lists no models."""
    try:
        models = await client.models()
    except (Unavailable, DeadlineExceeded) as error:
        raise NoServerError(
            f"no server answers at {config.address}; start one with `tokenweir serve`, or give "
            f"another address ({error})"
        ) from error
    except NotSupported:
        return None
    for model in models:
        if model.model == config.model:
            return model
    served = ", ".join(sorted(model.model for model in models)) or "none"
    raise LoadTestError(
        f"the server at {config.address} has no model {config.model!r}; it has: {served}"
    )


def _method(model: ModelInfo | None) -> str:
    if model is None or not model.capabilities:
        return _METHODS[0]
    for method in _METHODS:
        if method in model.capabilities:
            return method
    raise LoadTestError(
        f"model {model.model!r} can {', '.join(model.capabilities)}; a load test needs one of "
        f"{', '.join(_METHODS)}"
    )


def _items(config: LoadConfig, model: ModelInfo | None) -> list[Item]:
    """Return the prompts, or the bytes of the image files that they name."""
    if model is None or model.architecture != "vision-encoder":
        return list(config.prompts)
    try:
        return [Path(prompt).read_bytes() for prompt in config.prompts]
    except OSError as error:
        raise LoadTestError(
            f"model {config.model!r} takes images, so prompts are paths of image files: {error}"
        ) from error


async def _versions(client: AsyncClient, model: ModelInfo | None) -> dict[str, str]:
    versions = {
        "python": platform.python_version(),
        "tokenweir": version("tokenweir"),
        "grpcio": version("grpcio"),
    }
    if model is not None:
        versions |= {"model": model.model_version, "manifest_sha256": model.manifest_sha256}
    try:
        return versions | {"server": (await client.server_info()).version}
    except TokenweirClientError:  # it need not say
        return versions
