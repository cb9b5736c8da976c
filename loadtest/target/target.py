"""Targets of requests: a server of any protocol, as the load test sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol

from loadtest.errors import LoadTestError
from loadtest.work.ask import Answer, Ask, Method


@dataclass(frozen=True)
class Found:
    """The server's description of itself and of the model."""

    method: Method  # for requests that name none
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Told:
    """Counts and times that come with an answer."""

    first_tokens: int = 0  # tokens in the first message
    input_tokens: int = 0
    cached_input_tokens: int | None = None  # kept of earlier requests; None: not told
    output_tokens: int = 0
    finish_reason: str = ""
    server_queue: float | None = None  # seconds, as the server measured it
    server_first_token: float | None = None  # seconds from arrival, as the server measured it
    server_batch_size: float | None = None  # sequences in its steps, mean


@dataclass(frozen=True, kw_only=True)
class Reply(Told):
    """An answer with its times, on the clock of the event loop."""

    message_times: tuple[float, ...] = ()  # messages that brought tokens
    answer: Answer | None = None  # if it was to be kept
    seed: int = 0  # seed of the sampling; 0: nothing was sampled


class CallFailed(Exception):
    """A request was answered with an error, or not at all."""

    def __init__(self, status: str, reason: str, message: str) -> None:
        super().__init__(message)
        self.status = status  # by the name of the protocol's, such as "RESOURCE_EXHAUSTED"
        self.reason = reason
        self.message = message


@dataclass(frozen=True)
class ServerSample:
    """How busy the server was at one time, over all its replicas."""

    time: float  # seconds from the start of the test
    running: int  # sequences in the running batches
    waiting: int  # requests
    cache_used: float  # 0 to 1, mean
    tokens_per_second: float
    wasted_tokens: int  # computed and in no answer, since the model was loaded


class Target(Protocol):
    """A model of a server."""

    async def find(self) -> Found:
        """Ask the server for the model; NoServerError, or LoadTestError if it is not there."""
        ...

    async def send(self, ask: Ask, *, keep: bool) -> Reply:
        """Send one request and read its answer, which is in the reply if it is to be kept.

        Raises CallFailed for an error of the server, TypeError or ValueError for a request that
        cannot be made.
        """
        ...

    async def sample(self, time: float) -> ServerSample | None:
        """Return how busy the server is; None if it does not say."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


@cache
def image_of(model: str, path: Path) -> bytes:
    """Return an image file that a model is asked of, read once; LoadTestError if it cannot be."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise LoadTestError(
            f"model {model!r} takes images, so prompts are paths of image files: {error}"
        ) from error
