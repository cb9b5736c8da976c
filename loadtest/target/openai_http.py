"""A model behind OpenAI's HTTP protocol, whose answers are streamed as server-sent events."""

from __future__ import annotations

import asyncio
import json
import platform
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import aiohttp
from pydantic import BaseModel, Field, JsonValue, ValidationError

from loadtest.errors import LoadTestError, NoServerError
from loadtest.target.target import CallFailed, Found, Reply, ServerSample
from loadtest.work.ask import Answer, Ask

_Form = TypeVar("_Form", bound=BaseModel)
_ASK_TIMEOUT = 10.0  # seconds for the server to say what it has; requests have their own
_MAX_LINE = 2**20  # bytes of an event
# Options of our client by the names of this protocol, and of the extensions that vLLM has; what is
# not here goes as it is.
_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "max_new_tokens": "max_tokens",
        "min_new_tokens": "min_tokens",
        "num_outputs": "n",
    }
)


class _Details(BaseModel):
    cached_tokens: int | None = None


class _Usage(BaseModel):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(BaseModel):
    content: str | None = None
    reasoning_content: str | None = None  # tokens like others, and no part of the answer


class _Choice(BaseModel):
    text: str | None = None  # a completion's
    delta: _Delta | None = None  # a conversation's
    finish_reason: str | None = None

    @property
    def piece(self) -> str:
        said = self.delta.content if self.delta else None
        return self.text or said or ""

    @property
    def has_tokens(self) -> bool:
        return bool(self.piece or (self.delta and self.delta.reasoning_content))


class _Event(BaseModel):
    """The part of an event of a stream that is read."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: JsonValue = None


class _Vector(BaseModel):
    embedding: list[float]


class _Vectors(BaseModel):
    """The part of an answer to /embeddings that is read."""

    data: list[_Vector] = Field(min_length=1)
    usage: _Usage = _Usage()


class OpenAiHttp:
    """Sends requests to `/completions`, conversations to `/chat/completions`, to `/embeddings`."""

    def __init__(self, url: str, model: str, timeout: float, token: str | None = None) -> None:
        self._url, self._model = url.rstrip("/"), model
        self._timeout = timeout
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None  # for the running event loop

    async def find(self) -> Found:
        """Look for the model in what the server lists; a server need not list any."""
        versions = {"python": platform.python_version(), "aiohttp": version("aiohttp")}
        try:
            async with self._open().get(
                f"{self._url}/models", timeout=aiohttp.ClientTimeout(_ASK_TIMEOUT)
            ) as response:
                listed = await response.json(content_type=None) if response.ok else {}
        except (aiohttp.ClientConnectionError, TimeoutError) as error:
            raise NoServerError(f"no server answers at {self._url} ({error})") from error
        except ValueError:  # no JSON
            listed = {}
        served = _ids(listed)
        if served and self._model not in served:
            raise LoadTestError(
                f"the server at {self._url} has no model {self._model!r}; it has: "
                f"{', '.join(served)}"
            )
        return Found("generate", versions)

    async def send(self, ask: Ask, *, keep: bool) -> Reply:
        """Send one request; CallFailed for an error of the server."""
        if isinstance(ask.prompt, Path):
            raise ValueError("an image cannot be sent to a server of OpenAI's protocol")
        match ask.method:
            case None | "generate":
                return await self._generate(ask, keep)
            case "embed":
                return await self._embed(ask)
            case method:
                raise ValueError(f"a server of OpenAI's protocol has no call to {method}")

    async def sample(self, time: float) -> ServerSample | None:
        """Return None: the protocol does not say how busy a server is."""
        return None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def _generate(self, ask: Ask, keep: bool) -> Reply:
        is_chat = ask.is_chat
        body = {
            **_options(ask),
            "stream": True,
            "stream_options": {"include_usage": True},
            ("messages" if is_chat else "prompt"): _listed(ask.prompt),
        }
        clock = asyncio.get_running_loop().time
        found = _Stream()
        async with self._post("chat/completions" if is_chat else "completions", body) as response:
            async for line in response.content:
                if line.startswith(b"data:"):
                    found.add(line[5:].strip(), clock())
        return found.reply(keep)

    async def _embed(self, ask: Ask) -> Reply:
        body = {**_options(ask), "input": _listed(ask.prompt)}
        async with self._post("embeddings", body) as response:
            found = _read(_Vectors, await response.read())
        vector: Answer = {"values": [*found.data[0].embedding]}
        return Reply(input_tokens=found.usage.prompt_tokens or 0, answer=vector)

    @asynccontextmanager
    async def _post(
        self, path: str, body: Mapping[str, object]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield the response of a call; CallFailed for whatever goes wrong with it."""
        timeout = aiohttp.ClientTimeout(self._timeout)
        body = {"model": self._model, **body}
        try:
            async with self._open().post(
                f"{self._url}/{path}", json=body, timeout=timeout
            ) as response:
                if not response.ok:
                    raise _failure(response.status, await response.text())
                yield response
        except TimeoutError as error:
            message = "the deadline passed before the answer was complete"
            raise CallFailed("DEADLINE_EXCEEDED", "", message) from error
        except aiohttp.ClientPayloadError as error:
            raise CallFailed("DATA_LOSS", "BROKEN_STREAM", str(error)) from error
        except aiohttp.ClientError as error:
            raise CallFailed("UNAVAILABLE", "", str(error)) from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers=self._headers,
                # No queue of our own, and nothing is sent where a server has just closed.
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                read_bufsize=_MAX_LINE,
            )
        return self._session


@dataclass
class _Stream:
    """The contents of one stream's events."""

    times: list[float] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    usage: _Usage = field(default_factory=_Usage)
    finish_reason: str = ""
    is_done: bool = False

    def add(self, data: bytes, now: float) -> None:
        """Take the data of one event; CallFailed for an error, or for what is no event."""
        if data == b"[DONE]":
            self.is_done = True
            return
        event = _read(_Event, data)
        if event.error:
            raise CallFailed("INTERNAL", "", str(event.error)[:500])
        self.usage = event.usage or self.usage
        for choice in event.choices or ():
            if choice.has_tokens:
                self.times.append(now)
                self.pieces.append(choice.piece)
            self.finish_reason = choice.finish_reason or self.finish_reason

    def reply(self, keep: bool) -> Reply:
        """Return the whole; CallFailed for a stream without its end."""
        if not (self.is_done or self.finish_reason):
            raise CallFailed("DATA_LOSS", "BROKEN_STREAM", "the stream ended without its end")
        answer: Answer = {"text": "".join(self.pieces), "finish_reason": self.finish_reason}
        usage, details = self.usage, self.usage.prompt_tokens_details or _Details()
        told = usage.completion_tokens
        return Reply(
            message_times=tuple(self.times),
            first_tokens=1,  # the protocol does not say how many an event has
            input_tokens=usage.prompt_tokens or 0,
            cached_input_tokens=details.cached_tokens,
            output_tokens=len(self.times) if told is None else told,
            finish_reason=self.finish_reason,
            answer=answer if keep else None,
        )


def _read(form: type[_Form], data: bytes) -> _Form:
    """Return what a server has sent; CallFailed where it is of another form."""
    try:
        return form.model_validate_json(data)
    except ValidationError as error:
        what = f"what the server sent cannot be read: {error.errors()[0]['msg']}"
        raise CallFailed("DATA_LOSS", "UNREADABLE", what) from error


def _failure(status: int, text: str) -> CallFailed:
    """Return the error of a response, with what its JSON says."""
    try:
        said = json.loads(text)["error"]
        return CallFailed(f"HTTP_{status}", str(said.get("code") or ""), str(said.get("message")))
    except (ValueError, KeyError, TypeError, AttributeError):
        return CallFailed(f"HTTP_{status}", "", text[:500])


def _options(ask: Ask) -> dict[str, object]:
    return {_NAMES.get(name, name): value for name, value in ask.options.items()}


def _listed(prompt: object) -> object:
    return list(prompt) if isinstance(prompt, tuple) else prompt


def _ids(listed: object) -> list[str]:
    """Return the models of an answer to /models; nothing if it is none."""
    data = listed.get("data") if isinstance(listed, Mapping) else None
    models = data if isinstance(data, list) else []
    return sorted(
        str(model["id"]) for model in models if isinstance(model, Mapping) and "id" in model
    )
