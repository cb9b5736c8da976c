"""A model behind Tokenweir's own protocol."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from tokenweir import (
    AsyncClient,
    DeadlineExceeded,
    ModelInfo,
    NotSupported,
    ReplicaLoad,
    TokenweirClientError,
    Unavailable,
)
from tokenweir import Prompt as ClientPrompt
from tokenweir.received import enum_name
from tokenweir.v1 import generation_service_pb2 as pb

from loadtest.errors import LoadTestError, NoServerError
from loadtest.target.stream_answer import FINISH_REASON, StreamAnswer
from loadtest.target.target import CallFailed, Found, Reply, ServerSample, image_of
from loadtest.work.ask import Answer, Ask, Method

_METHODS: tuple[Method, ...] = ("generate", "classify", "label", "embed")  # in the order of choice
_ASK_TIMEOUT = 10.0  # seconds for the server to say what it has; requests have their own


class TokenweirGrpc:
    """Sends requests as the Python client does, with one attempt each: a retry hides a refusal."""

    def __init__(
        self,
        address: str,
        model: str,
        timeout: float,
        client_arguments: Mapping[str, Any],
        admin_address: str | None = None,
    ) -> None:
        self._address, self._model = address, model
        arguments = dict(client_arguments)
        admin_token = arguments.pop("admin_token", None)
        connect = partial(AsyncClient, max_attempts=1)
        self._asking = connect(address, timeout=_ASK_TIMEOUT, **arguments)
        self._client = connect(address, timeout=timeout, **arguments)
        self._admin = self._asking
        if admin_address is not None:
            arguments["token"] = admin_token
            self._admin = connect(admin_address, timeout=_ASK_TIMEOUT, **arguments)
        self._found = Found("generate")
        self._is_sampled = True
        self._takes_images = False

    async def find(self) -> Found:
        """Find the model at the server; NoServerError or LoadTestError if it is not there."""
        model = await self._find_model()
        self._takes_images = model is not None and model.architecture == "vision-encoder"
        self._found = Found(_method(model), await self._versions(model))
        return self._found

    async def send(self, ask: Ask, *, keep: bool) -> Reply:
        """Send one request; CallFailed for an error of the server."""
        try:
            match ask.method or self._found.method:
                case "generate":
                    return await self._generate(ask, keep)
                case "score":
                    return await self._score(ask)
                case method:
                    return await self._predict(ask, method)
        except TokenweirClientError as error:
            raise CallFailed(error.code.name, error.reason, str(error.args[0])) from error

    async def sample(self, time: float) -> ServerSample | None:
        """Ask how busy the model's replicas are; None once the server has not said it."""
        if not self._is_sampled:
            return None
        try:
            loads = [one for one in await self._admin.load() if one.model in ("", self._model)]
        except TokenweirClientError:
            self._is_sampled = False
            return None
        return _sample(time, loads) if loads else None

    async def close(self) -> None:
        """Close all clients."""
        await self._admin.close()
        await self._asking.close()
        await self._client.close()

    async def _generate(self, ask: Ask, keep: bool) -> Reply:
        clock = asyncio.get_running_loop().time
        times: list[float] = []
        first_tokens, reason = 0, ""
        answer = StreamAnswer() if keep else None
        summary: pb.GenerateStreamResponse.Summary | None = None
        prompt, options = cast(ClientPrompt, ask.prompt), cast(Any, ask.options)
        async for message in self._client.stream_events(self._model, prompt, **options):
            if message.HasField("delta"):
                if not times:
                    first_tokens = max(1, len(message.delta.tokens.ids))
                times.append(clock())
            elif message.HasField("finished"):
                reason = reason or enum_name(FINISH_REASON, message.finished.finish_reason)
            else:
                summary = message.summary
            if answer is not None:
                answer.add(message)
        if summary is None or not reason:
            raise CallFailed("DATA_LOSS", "BROKEN_STREAM", "the stream ended without its summary")
        return Reply(
            message_times=tuple(times),
            first_tokens=first_tokens,
            finish_reason=reason,
            answer=answer.answer() if answer is not None else None,
            seed=summary.provenance.seed,
            **_measures(summary),
        )

    async def _score(self, ask: Ask) -> Reply:
        if ask.target is None:
            raise ValueError("a score needs a target; give the request a `target`")
        source, options = cast(ClientPrompt, ask.prompt), cast(Any, ask.options)
        found = await self._client.score(self._model, source, ask.target, **options)
        answer: Answer = {
            "sum_logprob": found.sum_logprob,
            "logprobs": [position.chosen.logprob for position in found.positions],
        }
        return _reply(found, answer)

    async def _predict(self, ask: Ask, method: Method) -> Reply:
        item = cast(Any, self._item(ask))
        options = cast(Any, ask.options)
        if method == "classify":
            classes = await self._client.classify(self._model, item, **options)
            labels = [[one.label, one.probability] for one in classes.labels]
            return _reply(classes, {"labels": cast(Any, labels)})
        if method == "label":
            found = await self._client.label(self._model, item, **options)
            spans = [
                [s.start_byte, s.end_byte, s.label.label, s.label.probability] for s in found.spans
            ]
            return _reply(found, {"spans": cast(Any, spans)})
        vector = await self._client.embed(self._model, item, **options)
        return _reply(vector, {"values": list(vector.values)})

    def _item(self, ask: Ask) -> object:
        """Return what is predicted of: a text, ids, or the bytes of an image."""
        if isinstance(ask.prompt, Path) or self._takes_images:
            return image_of(self._model, Path(cast(str, ask.prompt)))
        return ask.prompt

    async def _find_model(self) -> ModelInfo | None:
        """Return what the server says of the model; None if it lists no models."""
        try:
            models = await self._asking.models()
        except (Unavailable, DeadlineExceeded) as error:
            if error.reason:  # it is there
                raise NoServerError(f"{self._address}: {error}") from error
            raise NoServerError(
                f"no server answers at {self._address}; start one with `tokenweir serve`, or give "
                f"another address ({error})"
            ) from error
        except NotSupported:
            return None
        for model in models:
            if model.model == self._model:
                return model
        served = ", ".join(sorted(model.model for model in models)) or "none"
        raise LoadTestError(
            f"the server at {self._address} has no model {self._model!r}; it has: {served}"
        )

    async def _versions(self, model: ModelInfo | None) -> Mapping[str, str]:
        versions = {
            "python": platform.python_version(),
            "tokenweir": version("tokenweir"),
            "grpcio": version("grpcio"),
        }
        if model is not None:
            versions |= {"model": model.model_version, "manifest_sha256": model.manifest_sha256}
        try:
            return versions | {"server": (await self._admin.server_info()).version}
        except TokenweirClientError:  # it need not say
            return versions


def _method(model: ModelInfo | None) -> Method:
    if model is None or not model.capabilities:
        return _METHODS[0]
    for method in _METHODS:
        if method in model.capabilities:
            return method
    raise LoadTestError(
        f"model {model.model!r} can {', '.join(model.capabilities)}; a load test needs one of "
        f"{', '.join(_METHODS)}"
    )


def _measures(summary: pb.GenerateStreamResponse.Summary) -> dict[str, Any]:
    usage, timing = summary.usage, summary.timing
    return {
        "input_tokens": usage.input_tokens,
        "cached_input_tokens": usage.cached_input_tokens,
        "output_tokens": usage.output_tokens,
        "server_queue": _seconds(timing.queue),
        "server_first_token": _seconds(timing.time_to_first_token),
        "server_batch_size": timing.mean_batch_size,
    }


def _seconds(duration: Any) -> float:
    return float(duration.seconds + duration.nanos / 1e9)


def _reply(found: Any, answer: Answer) -> Reply:
    """Return what came back of a call without a stream."""
    return Reply(input_tokens=found.usage.input_tokens, answer=answer)


def _sample(time: float, loads: list[ReplicaLoad]) -> ServerSample:
    wasted = sum(sum(vars(load.wasted).values()) for load in loads)
    return ServerSample(
        time=time,
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        cache_used=sum(load.cache_used for load in loads) / len(loads),
        tokens_per_second=sum(load.tokens_per_second for load in loads),
        wasted_tokens=wasted,
    )
