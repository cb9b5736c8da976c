"""The calls of a server, for threads (Client) and for asyncio (AsyncClient)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Self, TypeVar, Unpack

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenweir import _answers as answers
from tokenweir import _requests as requests
from tokenweir._channel import CLOSED, Metadata, call_metadata, far_end
from tokenweir._errors import (
    TokenweirClientError,
    closed_under_way,
    deadline_after,
    seconds_until,
    typed_errors,
)
from tokenweir._many import ManyCalls
from tokenweir._options import (
    Aggregation,
    CallOptions,
    Chat,
    GenerateOptions,
    Item,
    LoadOptions,
    OperationOptions,
    PredictOptions,
    Prompt,
    ScoreOptions,
    StreamOptions,
)
from tokenweir._resuming import Resumption, SeenMessages
from tokenweir._streams import AsyncTextStream, TextStream
from tokenweir._types import (
    Answers,
    Classification,
    Embedding,
    Generation,
    Generations,
    LabelledSpan,
    Labelling,
    ModelInfo,
    ReplicaLoad,
    Score,
    ScoredLabel,
    ServerInfo,
    TargetScore,
)
from tokenweir.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    generation_service_pb2,
    generation_service_pb2_grpc,
    prediction_service_pb2_grpc,
)

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)
CallT = TypeVar("CallT")


class Client:
    """Calls a server from ordinary code; safe to share between threads."""

    def __init__(
        self,
        address: str | None = None,
        *,
        channel: grpc.Channel | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        metadata: Metadata = (),
        timeout: float | None = 60.0,
        max_attempts: int = 3,
    ) -> None:
        """Prepare a channel to `address` ("host:port"); nothing is sent before the first call.

        With `credentials` it is encrypted. `channel` is used in place of one to an address, and is
        closed with the client; its own options say what is retried. `token` says who calls, and
        `metadata` goes with every call too. `timeout` is the deadline of a call in seconds, None
        for no deadline; `max_attempts` is the number of times that a call is tried in all, 1 for no
        retry. A stream that broke goes on where it broke as often, too.
        """
        end = far_end(address, channel, credentials, max_attempts)
        self._timeout = timeout
        self._max_attempts = max_attempts
        self._metadata = call_metadata(metadata, token)
        self._closed = False
        self._channel = end if isinstance(end, grpc.Channel) else end.channel()
        self._generation = generation_service_pb2_grpc.GenerationServiceStub(self._channel)
        self._prediction = prediction_service_pb2_grpc.PredictionServiceStub(self._channel)
        self._admin = admin_service_pb2_grpc.AdminServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)

    def generate(
        self, model: str, prompt: Prompt | Chat, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Generate from a text, token ids or a conversation, and return everything at once."""
        request = requests.generate_request(model, prompt, options)
        return answers.generation(self._call(self._generation.Generate, request, options))

    def generate_many(
        self, model: str, prompts: Sequence[Prompt | Chat], **options: Unpack[GenerateOptions]
    ) -> Generations:
        """Generate from several prompts, in calls of 64, or as many as the server takes.

        One deadline holds for all. If some are refused, InvalidArgument names them and has what
        the `others` got.
        """
        request = requests.generate_many_request(model, prompts, options)
        calls = self._call_many(self._generation.Generate, request, options)
        return calls.told(answers.generations(calls.response))

    def stream(
        self, model: str, prompt: Prompt | Chat, **options: Unpack[StreamOptions]
    ) -> TextStream:
        """Generate, and return an iterator of the pieces of text as they come."""
        request = requests.stream_request(model, prompt, options)
        requests.check_single_output(options)
        deadline = deadline_after(options.get("timeout", self._timeout))
        self._check_open()
        method = self._generation.GenerateStream
        start = partial(_start, method, self._metadata)
        return TextStream(Resumption(start, request, deadline, self._max_attempts))

    def score(
        self, model: str, source: Prompt, target: Prompt, **options: Unpack[ScoreOptions]
    ) -> Score:
        """Return the log-probability of a target behind a source, and of each of its tokens."""
        request = requests.score_request(model, source, target, options)
        return answers.score(self._call(self._generation.Score, request, options))

    def score_many(
        self, model: str, pairs: Sequence[tuple[Prompt, Prompt]], **options: Unpack[ScoreOptions]
    ) -> Answers[TargetScore]:
        """Score several targets, each behind its source, as `generate_many`."""
        request = requests.score_many_request(model, pairs, options)
        calls = self._call_many(self._generation.Score, request, options)
        return calls.told(answers.scores(calls.response))

    def classify(
        self,
        model: str,
        item: Item,
        *,
        top: int | None = None,
        **options: Unpack[PredictOptions],
    ) -> Classification:
        """Classify a text, token ids or an image (bytes or Path): the `top` best labels, 0: all."""
        request = requests.classify_request(model, [item], top, options)
        return answers.classification(self._call(self._prediction.Classify, request, options))

    def classify_many(
        self,
        model: str,
        items: Sequence[Item],
        *,
        top: int | None = None,
        **options: Unpack[PredictOptions],
    ) -> Answers[tuple[ScoredLabel, ...]]:
        """Classify several items as `generate_many`; `text_pair` is of all of them."""
        requests.check_list(items, "items")
        request = requests.classify_request(model, items, top, options)
        calls = self._call_many(self._prediction.Classify, request, options)
        return calls.told(answers.classifications(calls.response))

    def label(
        self,
        model: str,
        text: str | Sequence[int],
        *,
        aggregation: Aggregation | None = None,
        stride: int | None = None,
        **options: Unpack[PredictOptions],
    ) -> Labelling:
        """Label the tokens of a text, or its entities; in windows that share `stride` tokens."""
        request = requests.label_request(model, [text], aggregation, stride, options)
        response = self._call(self._prediction.Label, request, options)
        return answers.labelling(response, text if isinstance(text, str) else "")

    def label_many(
        self,
        model: str,
        texts: Sequence[str | Sequence[int]],
        *,
        aggregation: Aggregation | None = None,
        stride: int | None = None,
        **options: Unpack[PredictOptions],
    ) -> Answers[tuple[LabelledSpan, ...]]:
        """Label the tokens of several texts as `generate_many`."""
        requests.check_list(texts, "texts")
        request = requests.label_request(model, texts, aggregation, stride, options)
        calls = self._call_many(self._prediction.Label, request, options)
        said = [request.items[place].text for place in calls.places]
        return calls.told(answers.labellings(calls.response, said))

    def embed(
        self,
        model: str,
        item: Item,
        *,
        normalize: bool = False,
        prompt_name: str | None = None,
        **options: Unpack[PredictOptions],
    ) -> Embedding:
        """Return the vector of a text, token ids or an image, scaled to length 1 if asked.

        `prompt_name`: the model's prompt in front of a text; None: its default one, "": none.
        """
        request = requests.embed_request(model, [item], normalize, prompt_name, options)
        return answers.embedding(self._call(self._prediction.Embed, request, options))

    def embed_many(
        self,
        model: str,
        items: Sequence[Item],
        *,
        normalize: bool = False,
        prompt_name: str | None = None,
        **options: Unpack[PredictOptions],
    ) -> Answers[tuple[float, ...]]:
        """Return the vectors of several items as `generate_many`."""
        requests.check_list(items, "items")
        request = requests.embed_request(model, items, normalize, prompt_name, options)
        calls = self._call_many(self._prediction.Embed, request, options)
        return calls.told(answers.embeddings(calls.response))

    def models(self) -> tuple[ModelInfo, ...]:
        """Return what the server serves."""
        found: list[ModelInfo] = []
        request = admin_service_pb2.ListModelsRequest()
        while True:
            page = self._call(self._admin.ListModels, request)
            found += map(answers.model_info, page.models)
            if not page.next_page_token:
                return tuple(found)
            request.page_token = page.next_page_token

    def server_info(self) -> ServerInfo:
        """Return what the server is; a gateway says it at its admin port."""
        request = admin_service_pb2.GetServerInfoRequest()
        return answers.server_info(self._call(self._admin.GetServerInfo, request))

    def load(self) -> tuple[ReplicaLoad, ...]:
        """Return how busy every replica is now; a gateway says it at its admin port."""
        request = admin_service_pb2.GetLoadRequest()
        return answers.replica_loads(self._call(self._admin.GetLoad, request))

    def abort(self, *request_ids: str) -> tuple[str, ...]:
        """End requests by their ids, at an admin port; return those that were there."""
        request = admin_service_pb2.AbortRequestsRequest(request_ids=request_ids)
        return tuple(self._call(self._admin.AbortRequests, request).aborted)

    def drain(self) -> None:
        """Have a server refuse new calls for good, at an admin port; return when none runs."""
        self._call(self._admin.Drain, admin_service_pb2.DrainRequest())

    def load_model(self, package: str, **options: Unpack[LoadOptions]) -> ModelInfo:
        """Have a server load a package, a path or URL there, at an admin port; wait for it.

        Models that serve go on; one that is loaded already is returned as it is.
        """
        request = requests.load_model_request(package, options)
        response = self._call(self._admin.LoadModel, request, requests.patient(options))
        return answers.model_info(response.model_info)

    def unload_model(
        self, model: str, model_version: str = "", **options: Unpack[OperationOptions]
    ) -> None:
        """Have a server end a version, at an admin port; return when its processes are gone."""
        request = requests.unload_model_request(model, model_version, options)
        self._call(self._admin.UnloadModel, request, requests.patient(options))

    def set_traffic(self, model: str, model_version: str, share: float) -> tuple[ModelInfo, ...]:
        """Give a version `share` percent of the calls that name none, at an admin port.

        Returns all versions of the model.
        """
        request = admin_service_pb2.SetTrafficRequest(
            model=model, model_version=model_version, share=share
        )
        response = self._call(self._admin.SetTraffic, request)
        return tuple(map(answers.model_info, response.models))

    def health(self, service: str = "") -> str:
        """Return "SERVING" or "NOT_SERVING" for a service or model, "" for the whole server.

        A name that the server does not know raises NotFound.
        """
        request = health_pb2.HealthCheckRequest(service=service)
        response = self._call(self._health.Check, request)
        return answers.health_status(response)

    def close(self) -> None:
        """Close the channel; what still runs on it ends with Cancelled."""
        self._closed = True
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call(
        self,
        method: grpc.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        options: CallOptions | None = None,
    ) -> ResponseT:
        timeout = (options or {}).get("timeout", self._timeout)
        self._check_open()
        with typed_errors(deadline_after(timeout)):
            return method(request, timeout=timeout, metadata=self._metadata)

    def _call_many(
        self,
        method: grpc.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        options: CallOptions,
    ) -> ManyCalls[RequestT, ResponseT]:
        calls: ManyCalls[RequestT, ResponseT] = ManyCalls(request, options)
        deadline = deadline_after(options.get("timeout", self._timeout))
        while (part := calls.next()) is not None:
            try:
                calls.answered(self._call(method, part, {"timeout": seconds_until(deadline)}))
            except TokenweirClientError as error:
                calls.failed(error)
        return calls

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError(CLOSED)


class AsyncClient:
    """Calls a server from asyncio; the channel is opened by the first call, on its event loop."""

    def __init__(
        self,
        address: str | None = None,
        *,
        channel: grpc.aio.Channel | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        token: str | None = None,
        metadata: Metadata = (),
        timeout: float | None = 60.0,
        max_attempts: int = 3,
    ) -> None:
        """Take the arguments of Client; a `channel` is one of grpc.aio."""
        self._end = far_end(address, channel, credentials, max_attempts)
        self._timeout = timeout
        self._max_attempts = max_attempts
        self._metadata = call_metadata(metadata, token)
        self._closed = False
        self._stubs: _AsyncStubs | None = None

    async def generate(
        self, model: str, prompt: Prompt | Chat, **options: Unpack[GenerateOptions]
    ) -> Generation:
        """Generate from a text, token ids or a conversation, and return everything at once."""
        request = requests.generate_request(model, prompt, options)
        method = self._open().generation.Generate
        return answers.generation(await self._call(method, request, options))

    async def generate_many(
        self, model: str, prompts: Sequence[Prompt | Chat], **options: Unpack[GenerateOptions]
    ) -> Generations:
        """Generate from several prompts, in calls of 64, or as many as the server takes.

        One deadline holds for all. If some are refused, InvalidArgument names them and has what
        the `others` got.
        """
        request = requests.generate_many_request(model, prompts, options)
        calls = await self._call_many(self._open().generation.Generate, request, options)
        return calls.told(answers.generations(calls.response))

    def stream(
        self, model: str, prompt: Prompt | Chat, **options: Unpack[StreamOptions]
    ) -> AsyncTextStream:
        """Generate, and return an asynchronous iterator of the pieces of text as they come."""
        request = requests.stream_request(model, prompt, options)
        requests.check_single_output(options)
        deadline = deadline_after(options.get("timeout", self._timeout))
        method = self._open().generation.GenerateStream
        start = partial(_start, method, self._metadata)
        return AsyncTextStream(Resumption(start, request, deadline, self._max_attempts))

    async def stream_messages(
        self,
        model: str,
        prompt: Prompt | Chat,
        max_attempts: int,
        admitted: asyncio.Event | None = None,
        **options: Unpack[StreamOptions],
    ) -> AsyncIterator[generation_service_pb2.GenerateStreamResponse]:
        """Generate, and yield the messages of the protocol as they come, of any number of outputs.

        A stream that breaks goes on as that of `stream`, as often as `max_attempts` says here.
        `admitted` is set when the server has begun with it.
        """
        request = requests.stream_request(model, prompt, options)
        deadline = deadline_after(options.get("timeout", self._timeout))
        start = partial(_start, self._open().generation.GenerateStream, self._metadata)
        resumption = Resumption(start, request, deadline, max_attempts)
        call, seen = resumption.begin(), SeenMessages()
        try:
            with typed_errors(deadline):
                if admitted is not None and await call.initial_metadata():  # not empty of ours
                    admitted.set()
                while True:
                    try:
                        async for message in call:
                            seen.add(message)
                            yield message
                        break
                    except grpc.RpcError as error:
                        pause = resumption.pause_after(error)
                    if seen.is_complete:
                        break
                    await asyncio.sleep(pause)
                    call = resumption.go_on(seen)
                if self._closed:  # grpcio 1.72 ends the loop as if all had come
                    raise closed_under_way()
        finally:
            call.cancel()

    async def score(
        self, model: str, source: Prompt, target: Prompt, **options: Unpack[ScoreOptions]
    ) -> Score:
        """Return the log-probability of a target behind a source, and of each of its tokens."""
        request = requests.score_request(model, source, target, options)
        return answers.score(await self._call(self._open().generation.Score, request, options))

    async def score_many(
        self, model: str, pairs: Sequence[tuple[Prompt, Prompt]], **options: Unpack[ScoreOptions]
    ) -> Answers[TargetScore]:
        """Score several targets, each behind its source, as `generate_many`."""
        request = requests.score_many_request(model, pairs, options)
        calls = await self._call_many(self._open().generation.Score, request, options)
        return calls.told(answers.scores(calls.response))

    async def stream_events(
        self, model: str, prompt: Prompt | Chat, **options: Unpack[StreamOptions]
    ) -> AsyncIterator[generation_service_pb2.GenerateStreamResponse]:
        """Generate, and yield the messages of the protocol as they come, unchecked.

        For measurements: no object and no task is made per message, and a stream that breaks ends
        with the error, which a measurement must not hide. That of `stream_messages` goes on.
        """
        request = requests.stream_request(model, prompt, options)
        timeout = options.get("timeout", self._timeout)
        deadline = deadline_after(timeout)
        method = self._open().generation.GenerateStream
        call = method(request, timeout=timeout, metadata=self._metadata)
        try:
            with typed_errors(deadline):
                async for message in call:
                    yield message
                if self._closed:  # grpcio 1.72 ends the loop as if all had come
                    raise closed_under_way()
        finally:
            call.cancel()

    async def classify(
        self,
        model: str,
        item: Item,
        *,
        top: int | None = None,
        **options: Unpack[PredictOptions],
    ) -> Classification:
        """Classify a text, token ids or an image (bytes or Path): the `top` best labels, 0: all."""
        request = requests.classify_request(model, [item], top, options)
        method = self._open().prediction.Classify
        return answers.classification(await self._call(method, request, options))

    async def classify_many(
        self,
        model: str,
        items: Sequence[Item],
        *,
        top: int | None = None,
        **options: Unpack[PredictOptions],
    ) -> Answers[tuple[ScoredLabel, ...]]:
        """Classify several items as `generate_many`; `text_pair` is of all of them."""
        requests.check_list(items, "items")
        request = requests.classify_request(model, items, top, options)
        calls = await self._call_many(self._open().prediction.Classify, request, options)
        return calls.told(answers.classifications(calls.response))

    async def label(
        self,
        model: str,
        text: str | Sequence[int],
        *,
        aggregation: Aggregation | None = None,
        stride: int | None = None,
        **options: Unpack[PredictOptions],
    ) -> Labelling:
        """Label the tokens of a text, or its entities; in windows that share `stride` tokens."""
        request = requests.label_request(model, [text], aggregation, stride, options)
        response = await self._call(self._open().prediction.Label, request, options)
        return answers.labelling(response, text if isinstance(text, str) else "")

    async def label_many(
        self,
        model: str,
        texts: Sequence[str | Sequence[int]],
        *,
        aggregation: Aggregation | None = None,
        stride: int | None = None,
        **options: Unpack[PredictOptions],
    ) -> Answers[tuple[LabelledSpan, ...]]:
        """Label the tokens of several texts as `generate_many`."""
        requests.check_list(texts, "texts")
        request = requests.label_request(model, texts, aggregation, stride, options)
        calls = await self._call_many(self._open().prediction.Label, request, options)
        said = [request.items[place].text for place in calls.places]
        return calls.told(answers.labellings(calls.response, said))

    async def embed(
        self,
        model: str,
        item: Item,
        *,
        normalize: bool = False,
        prompt_name: str | None = None,
        **options: Unpack[PredictOptions],
    ) -> Embedding:
        """Return the vector of a text, token ids or an image, scaled to length 1 if asked.

        `prompt_name`: the model's prompt in front of a text; None: its default one, "": none.
        """
        request = requests.embed_request(model, [item], normalize, prompt_name, options)
        method = self._open().prediction.Embed
        return answers.embedding(await self._call(method, request, options))

    async def embed_many(
        self,
        model: str,
        items: Sequence[Item],
        *,
        normalize: bool = False,
        prompt_name: str | None = None,
        **options: Unpack[PredictOptions],
    ) -> Answers[tuple[float, ...]]:
        """Return the vectors of several items as `generate_many`."""
        requests.check_list(items, "items")
        request = requests.embed_request(model, items, normalize, prompt_name, options)
        calls = await self._call_many(self._open().prediction.Embed, request, options)
        return calls.told(answers.embeddings(calls.response))

    async def models(self) -> tuple[ModelInfo, ...]:
        """Return what the server serves."""
        found: list[ModelInfo] = []
        request = admin_service_pb2.ListModelsRequest()
        while True:
            page = await self._call(self._open().admin.ListModels, request)
            found += map(answers.model_info, page.models)
            if not page.next_page_token:
                return tuple(found)
            request.page_token = page.next_page_token

    async def server_info(self) -> ServerInfo:
        """Return what the server is; a gateway says it at its admin port."""
        request = admin_service_pb2.GetServerInfoRequest()
        return answers.server_info(await self._call(self._open().admin.GetServerInfo, request))

    async def load(self) -> tuple[ReplicaLoad, ...]:
        """Return how busy every replica is now; a gateway says it at its admin port."""
        request = admin_service_pb2.GetLoadRequest()
        return answers.replica_loads(await self._call(self._open().admin.GetLoad, request))

    async def abort(self, *request_ids: str) -> tuple[str, ...]:
        """End requests by their ids, at an admin port; return those that were there."""
        request = admin_service_pb2.AbortRequestsRequest(request_ids=request_ids)
        return tuple((await self._call(self._open().admin.AbortRequests, request)).aborted)

    async def drain(self) -> None:
        """Have a server refuse new calls for good, at an admin port; return when none runs."""
        await self._call(self._open().admin.Drain, admin_service_pb2.DrainRequest())

    async def load_model(self, package: str, **options: Unpack[LoadOptions]) -> ModelInfo:
        """Have a server load a package, a path or URL there, at an admin port; wait for it.

        Models that serve go on; one that is loaded already is returned as it is.
        """
        request = requests.load_model_request(package, options)
        patient = requests.patient(options)
        response = await self._call(self._open().admin.LoadModel, request, patient)
        return answers.model_info(response.model_info)

    async def unload_model(
        self, model: str, model_version: str = "", **options: Unpack[OperationOptions]
    ) -> None:
        """Have a server end a version, at an admin port; return when its processes are gone."""
        request = requests.unload_model_request(model, model_version, options)
        await self._call(self._open().admin.UnloadModel, request, requests.patient(options))

    async def set_traffic(
        self, model: str, model_version: str, share: float
    ) -> tuple[ModelInfo, ...]:
        """Give a version `share` percent of the calls that name none, at an admin port.

        Returns all versions of the model.
        """
        request = admin_service_pb2.SetTrafficRequest(
            model=model, model_version=model_version, share=share
        )
        response = await self._call(self._open().admin.SetTraffic, request)
        return tuple(map(answers.model_info, response.models))

    async def health(self, service: str = "") -> str:
        """Return "SERVING" or "NOT_SERVING" for a service or model, "" for the whole server.

        A name that the server does not know raises NotFound.
        """
        request = health_pb2.HealthCheckRequest(service=service)
        return answers.health_status(await self._call(self._open().health.Check, request))

    def calling_as(
        self,
        token: str | None = None,
        metadata: Metadata = (),
        stream_attempts: int | None = None,
    ) -> AsyncClient:
        """Return a client of the same channel that calls with another token, if one is given.

        `metadata` goes with its calls beside that of this client, which alone is to be closed. Its
        streams go on where one broke, as often as `stream_attempts` says, if that is given.
        Raises ValueError for a token that no header can carry.
        """
        stubs = self._open()
        own = self._metadata
        if token is not None:
            own = tuple(entry for entry in own if entry[0] != "authorization")
        other = AsyncClient(
            channel=stubs.channel,
            token=token,
            metadata=(*own, *metadata),
            timeout=self._timeout,
            max_attempts=stream_attempts or self._max_attempts,
        )
        other._stubs = stubs
        return other

    async def close(self) -> None:
        """Close the channel; what still runs on it ends with Cancelled."""
        self._closed = True
        if self._stubs is not None:
            await self._stubs.channel.close()
        elif isinstance(self._end, grpc.aio.Channel):
            await self._end.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def _open(self) -> _AsyncStubs:
        # Not in __init__: a channel belongs to the event loop that runs when it is made.
        if self._closed:
            raise ValueError(CLOSED)
        if self._stubs is None:
            end = self._end
            channel = end if isinstance(end, grpc.aio.Channel) else end.async_channel()
            self._stubs = _AsyncStubs(channel)
        return self._stubs

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        options: CallOptions | None = None,
    ) -> ResponseT:
        timeout = (options or {}).get("timeout", self._timeout)
        with typed_errors(deadline_after(timeout)):
            return await method(request, timeout=timeout, metadata=self._metadata)

    async def _call_many(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        options: CallOptions,
    ) -> ManyCalls[RequestT, ResponseT]:
        calls: ManyCalls[RequestT, ResponseT] = ManyCalls(request, options)
        deadline = deadline_after(options.get("timeout", self._timeout))
        while (part := calls.next()) is not None:
            try:
                asked: CallOptions = {"timeout": seconds_until(deadline)}
                calls.answered(await self._call(method, part, asked))
            except TokenweirClientError as error:
                calls.failed(error)
        return calls


def _start(
    method: Callable[..., CallT],
    metadata: Sequence[tuple[str, str | bytes]],
    request: generation_service_pb2.GenerateStreamRequest,
    timeout: float | None,
) -> CallT:
    return method(request, timeout=timeout, metadata=metadata)


class _AsyncStubs:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.generation = generation_service_pb2_grpc.GenerationServiceStub(channel)
        self.prediction = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        self.admin = admin_service_pb2_grpc.AdminServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
