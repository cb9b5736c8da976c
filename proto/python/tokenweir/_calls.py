"""The calls of a server that both clients have, for asyncio; _sync_calls.py is made of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar, Unpack

import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenweir import _answers as answers
from tokenweir import _requests as requests
from tokenweir._errors import (
    TokenweirClientError,
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
from tokenweir._streams import AsyncTextStream, Resumption
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
    generation_service_pb2_grpc,
    prediction_service_pb2_grpc,
)
from tokenweir.v1.prediction_service_pb2 import ClassifyRequest, EmbedRequest, LabelRequest

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)


class AsyncStubs:
    """The services of a server, called over a channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.generation = generation_service_pb2_grpc.GenerationServiceStub(channel)
        self.prediction = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        self.admin = admin_service_pb2_grpc.AdminServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)


class AsyncCalls(ABC):
    """The calls, each with the client's metadata and deadline."""

    def __init__(
        self,
        metadata: tuple[tuple[str, str | bytes], ...],
        timeout: float | None,
        max_attempts: int,
    ) -> None:
        self._metadata = metadata
        self._timeout = timeout
        self._max_attempts = max_attempts

    @abstractmethod
    def _open(self) -> AsyncStubs:
        """Return the services; ValueError if the client is closed."""

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
        """Generate, and return an iterator of the pieces of text as they come."""
        request = requests.stream_request(model, prompt, options)
        requests.check_single_output(options)
        deadline = deadline_after(options.get("timeout", self._timeout))
        method = self._open().generation.GenerateStream
        return AsyncTextStream(
            Resumption(method, self._metadata, request, deadline, self._max_attempts)
        )

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

    async def classify(
        self,
        model: str,
        item: Item,
        *,
        top: int | None = None,
        **options: Unpack[PredictOptions],
    ) -> Classification:
        """Classify a text, token ids or an image (bytes or Path): the `top` best labels, 0: all."""
        request = requests.prediction_request(ClassifyRequest, model, [item], options, top=top)
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
        request = requests.prediction_request(ClassifyRequest, model, items, options, top=top)
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
        request = requests.prediction_request(
            LabelRequest, model, [text], options, aggregation=aggregation, stride=stride
        )
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
        request = requests.prediction_request(
            LabelRequest, model, texts, options, aggregation=aggregation, stride=stride
        )
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
        request = requests.prediction_request(
            EmbedRequest, model, [item], options, normalize=normalize, prompt_name=prompt_name
        )
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
        request = requests.prediction_request(
            EmbedRequest, model, items, options, normalize=normalize, prompt_name=prompt_name
        )
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
        response = await self._call(self._open().admin.AbortRequests, request)
        return tuple(response.aborted)

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

    async def _call(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT],
        request: RequestT,
        options: CallOptions | None = None,
    ) -> ResponseT:
        timeout = (options or {}).get("timeout", self._timeout)
        self._open()  # one that was closed meanwhile makes no more calls
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
