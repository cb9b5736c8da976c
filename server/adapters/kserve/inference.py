"""Runs the models of the server behind, for callers over gRPC and over HTTP."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager, aclosing
from dataclasses import replace
from typing import Any

import grpc
from tokenweir import AsyncClient, ModelInfo, NotFound

from server.adapters.caller import is_serving
from server.adapters.kserve.errors import Refused, refused_arguments
from server.adapters.kserve.requests import InferRequest
from server.adapters.kserve.statistics import Statistics
from server.adapters.kserve.tasks import (
    TASKS,
    TEXTS,
    Answered,
    Asked,
    Task,
    answered,
    generation_of,
    items_of,
    run,
    run_task,
    tasks_for,
    tensors,
)
from server.adapters.kserve.tensors import Tensor

Versions = list[ModelInfo]  # one model's, at least one
_KNOWN_SECONDS = 5.0  # validity of a model's description
_TIMEOUT = "timeout"  # in microseconds, as Triton's clients send it


class Inference:
    """Calls of the server behind; a `caller` is our client with the token of the one who asks."""

    def __init__(self, client: AsyncClient, timeout: float) -> None:
        """`timeout` is the most that a request has, in seconds."""
        self._client, self._timeout = client, timeout
        self._models: dict[str, tuple[float, Versions]] = {}
        self._statistics = Statistics()

    async def is_serving(self, name: str = "") -> bool:
        """Return whether a model serves, "" for the server behind; NotFound for an unknown one."""
        return await is_serving(self._client, name)

    async def is_ready(self, caller: AsyncClient, name: str, version: str) -> bool:
        """Return whether a model serves, or one version of it."""
        try:
            serves = await self.is_serving(name)
        except NotFound:
            return False
        if not serves or not version:
            return serves
        found = await self.versions(caller, name)
        return version in {model.model_version for model in found if model.state == "ready"}

    async def model(
        self, caller: AsyncClient, name: str, version: str
    ) -> tuple[ModelInfo, list[str]]:
        """Return a version of a model, "" for the first, and all of its versions."""
        found = await self.versions(caller, name)
        versions = [model.model_version for model in found]
        if version and version not in versions:
            raise Refused(
                f"{name} has version {', '.join(versions)}, not {version}",
                grpc.StatusCode.NOT_FOUND,
            )
        return found[versions.index(version) if version else 0], versions

    async def versions(self, caller: AsyncClient, name: str) -> Versions:
        """Return the server's description of a model for the caller; Refused for none."""
        now = time.monotonic()
        found: dict[str, Versions] = defaultdict(list)
        for model in await caller.models():
            found[model.model].append(model)
        self._models = {known: (now, models) for known, models in found.items()}
        if name not in found:
            raise Refused(
                f"no model {name!r} is served here; there are {', '.join(sorted(found)) or 'none'}",
                grpc.StatusCode.NOT_FOUND,
            )
        return found[name]

    async def infer(
        self, caller: AsyncClient, request: InferRequest, seconds: float | None = None
    ) -> Answered:
        """Run a model; `seconds` is the time that the caller gives it."""
        tasks, asked = await self._asked(caller, request, seconds)
        with self._counting(asked) as answers, refused_arguments():
            found = await run(tasks, caller, asked)
            answers.append(found)
            return _chosen(found, request)

    async def stream(
        self, caller: AsyncClient, request: InferRequest, seconds: float | None = None
    ) -> AsyncGenerator[Answered]:
        """Run a model, and yield the pieces of its answer; of other tasks than texts it is one."""
        tasks, asked = await self._asked(caller, request, seconds)
        with self._counting(asked) as answers, refused_arguments():
            if TASKS["generate"] not in tasks:
                found = await run(tasks, caller, asked)
                answers.append(found)
                yield _chosen(found, request)
                return
            async with aclosing(_in_pieces(caller, asked)) as pieces:
                async for piece in pieces:
                    if piece.usage is not None:  # the last one
                        answers.append(piece)
                    yield _chosen(piece, request)

    async def statistics(self, caller: AsyncClient, name: str, version: str) -> dict[str, Any]:
        """Return what ModelStatistics tells of a model and version, "" for all."""
        found: Sequence[ModelInfo]
        if name and version:
            model, _ = await self.model(caller, name, version)
            found = [model]
        else:
            found = await self.versions(caller, name) if name else await caller.models()
        return {"model_stats": list(map(self._statistics.of, found))}

    def _counting(self, asked: Asked) -> AbstractContextManager[list[Answered]]:
        return self._statistics.counting(asked.model.model, asked.model.model_version)

    async def _asked(
        self, caller: AsyncClient, request: InferRequest, seconds: float | None
    ) -> tuple[list[Task], Asked]:
        parameters = dict(request.parameters)
        options: dict[str, Any] = {
            "model_version": request.version or None,
            "request_id": request.id or None,
            "timeout": self._seconds(parameters.pop(_TIMEOUT, None), seconds),
            "answer_others": False,  # nobody would get their answers
        }
        # The call itself refuses callers that may not use the model.
        told, models = self._models.get(request.model, (0.0, []))
        if not models or time.monotonic() - told >= _KNOWN_SECONDS:
            models = await self.versions(caller, request.model)
        named = (model for model in models if model.model_version == request.version)
        model = next(named, models[0])
        tasks = tasks_for(model, request.outputs)
        return tasks, Asked(model, request.inputs, parameters, request.outputs, options)

    def _seconds(self, microseconds: Any, seconds: float | None) -> float:
        """Return the time that a call has: the least of what is said of it."""
        limits = [self._timeout, seconds]
        if microseconds is not None:
            if type(microseconds) is not int or microseconds < 0:
                raise Refused(f"timeout ({microseconds}) is to be a number of microseconds")
            limits.append(microseconds / 1e6 or None)  # 0 says nothing
        return min(limit for limit in limits if limit is not None)


def _chosen(found: Answered, request: InferRequest) -> Answered:
    """Return an answer with the outputs alone that were asked for."""
    outputs = tuple(one for one in found.outputs if one.name in (request.outputs or (one.name,)))
    return replace(found, outputs=outputs)


async def _in_pieces(client: AsyncClient, asked: Asked) -> AsyncGenerator[Answered]:
    """Yield the pieces of one text; all at once where it is not to be streamed.

    The last has an empty text. Raises Refused for several texts or outputs: pieces do not say which
    one they are of.
    """
    asked, is_streamed = generation_of(asked)
    task = TASKS["generate"]
    if is_streamed is False:
        yield await run_task(task, client, asked)
        return
    items = await items_of(asked)
    num_outputs = asked.parameters.get("num_outputs") or 1
    if len(items) != 1 or num_outputs != 1:
        raise Refused(
            f"{len(items)} texts with {num_outputs} outputs each are to be streamed; give one text "
            "with one output in a request, or the parameter stream as false"
        )
    options = {**asked.parameters, **asked.options, "num_outputs": 1}
    del options["answer_others"]  # there are none
    names = [name for name in TEXTS if name in asked.outputs]
    async with client.stream(asked.model.model, items[0], **options) as stream:
        async for text in stream:
            if names:
                values = [text.encode()]
                yield Answered(tuple(Tensor(name, "BYTES", (1, 1), values) for name in names))
    found = stream.result
    last = replace(found.sequences[0], text="")
    yield answered(tensors(task, [[last]], asked.outputs), found)
