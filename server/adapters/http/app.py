"""The endpoints of the HTTP server."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import grpc
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tokenweir import (
    AsyncClient,
    GenerateOptions,
    ModelInfo,
    StreamOptions,
    TokenweirClientError,
)

from server.adapters.caller import HEALTH_SECONDS, STREAM_ATTEMPTS, client_as
from server.adapters.config import HttpConfig
from server.adapters.http.answers import Form, envelope, usage_json
from server.adapters.http.body import parsed
from server.adapters.http.bound import Bound
from server.adapters.http.chat import ChatForm, ChatRequest, ConversationRequest
from server.adapters.http.completions import CompletionRequest, TextForm
from server.adapters.http.counts import Counting, Counts
from server.adapters.http.embeddings import EmbeddingRequest, embeddings_json
from server.adapters.http.errors import AsSent, HttpError, http_error, refused_arguments
from server.adapters.http.gone import unless_gone
from server.adapters.http.inference import InferenceEndpoints
from server.adapters.http.load_history import LoadHistory
from server.adapters.http.page import Page
from server.adapters.http.predictions import PredictionRequest, predict
from server.adapters.http.requests import GenerationRequest, OpenAiRequest, RequestOfOneModel
from server.adapters.http.response_writer import ResponseForm, ResponseWriter
from server.adapters.http.responses import ResponsesRequest
from server.adapters.http.streams import (
    Chunks,
    EventStream,
    Message,
    Streams,
    WholeStream,
    Writer,
    events,
)
from server.adapters.http.tei import EmbedRequest, PredictRequest, embed, info_json
from server.adapters.http.tei import predict as classify
from server.adapters.http.tokens import DetokenizeRequest, TokenizeRequest, detokenize, tokenize
from server.adapters.http.tools import is_constrained
from server.adapters.kserve.errors import Refused
from server.http_server import CERTIFIED

logger = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=OpenAiRequest)
OneModelT = TypeVar("OneModelT", bound=RequestOfOneModel)
Prompt = str | list[int] | list[dict[str, Any]]
_REQUEST_ID = "x-request-id"
_MAX_ID = 128  # characters
_MAX_STREAMS = 64  # per request


def application(
    client: AsyncClient, config: HttpConfig, history: LoadHistory | None = None
) -> Starlette:
    """Return the ASGI application that answers by a client of our server.

    `history` is what its page shows of workers and load.
    """
    endpoints, counts = Endpoints(client, config), Counts()
    page = Page(endpoints.caller, endpoints.server_health, history, counts, config.admin_token)
    get, post = ["GET"], ["POST"]
    routes = [
        Route("/health", endpoints.health, methods=get),
        Route("/v1/models", endpoints.models, methods=get),
        Route("/v1/models/{model:path}", endpoints.model, methods=get),
        Route("/v1/completions", endpoints.completions, methods=post),
        Route("/v1/chat/completions", endpoints.chat, methods=post),
        Route("/v1/responses", endpoints.responses, methods=post),
        Route("/v1/embeddings", endpoints.embeddings, methods=post),
        Route("/embeddings", endpoints.embeddings, methods=post),  # as Infinity's clients call it
        Route("/tokenize", endpoints.tokenize, methods=post),
        Route("/detokenize", endpoints.detokenize, methods=post),
        Route("/embed", endpoints.embed, methods=post),
        Route("/", endpoints.embed, methods=post),  # as Hugging Face's clients call it
        Route("/predict", endpoints.classify, methods=post),
        Route("/info", endpoints.info, methods=get),
        Route("/page/predict", endpoints.predict, methods=post),
        *InferenceEndpoints(client, endpoints.caller, config).routes,
        *page.routes,
    ]
    return Starlette(
        routes=routes,
        middleware=[
            Middleware(Counting, counts=counts, routes=routes),
            *_for_pages(config.allowed_origins),
            Middleware(Bound, max_requests=config.max_requests),
        ],
        exception_handlers={
            HttpError: _answer_refusal,
            Refused: _answer_refused_tensors,
            TokenweirClientError: _answer_failure,
            HTTPException: _answer_wrong_path,
            Exception: _answer_bug,
        },
    )


class Endpoints:
    """Answers OpenAI's requests by calls of the server behind."""

    def __init__(self, client: AsyncClient, config: HttpConfig) -> None:
        self._client, self._config = client, config

    async def health(self, request: Request) -> Response:
        """Return whether the server behind serves: 200 or 503."""
        status = await self.server_health()
        return JSONResponse({"status": status}, 200 if status == "SERVING" else 503)

    async def server_health(self) -> str:
        """Return "SERVING" or "NOT_SERVING"."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                return await self._client.health()
        except (TokenweirClientError, TimeoutError):
            return "NOT_SERVING"

    async def models(self, request: Request) -> Response:
        """List the models."""
        found = await self.caller(request).models()
        # Clients that are told no name take the first, and most of them generate.
        listed = sorted(found, key=lambda model: "generate" not in model.capabilities)
        return JSONResponse({"object": "list", "data": list(map(_model_json, listed))})

    async def model(self, request: Request) -> Response:
        """Describe one model."""
        name = request.path_params["model"]
        for model in await self.caller(request).models():
            if model.model == name:
                return JSONResponse(_model_json(model))
        raise _unknown_model(name)

    async def completions(self, request: Request) -> Response:
        """Complete one or more prompts."""
        asked = await self._asked(request, CompletionRequest, TextForm.prefix)
        with refused_arguments():
            options = asked.options
        form, writer = TextForm(asked), Writer()
        return await self._generate(request, asked, asked.prompt, form, writer, options)

    async def chat(self, request: Request) -> Response:
        """Answer in a conversation, with a model that has a chat template."""
        asked = await self._asked(request, ChatRequest, ChatForm.prefix)
        return await self._converse(request, asked, asked.messages, ChatForm, Writer())

    async def responses(self, request: Request) -> Response:
        """Answer in a conversation, in the form of OpenAI's responses, of which none is stored."""
        asked = await self._asked(request, ResponsesRequest, "resp_")
        writer = ResponseWriter(asked.echoed, request.state.request_id, asked.model)
        return await self._converse(request, asked, asked.conversation, ResponseForm, writer)

    async def _converse(
        self,
        request: Request,
        asked: ConversationRequest,
        conversation: list[dict[str, Any]],
        form_of: type[ChatForm],
        writer: Writer,
    ) -> Response:
        with refused_arguments():
            calling, options = asked.calling, asked.options
        prompts = [conversation]
        if calling is None:
            form = form_of(asked, is_constrained=is_constrained(options))
            return await self._generate(request, asked, prompts, form, writer, options)
        models = [one for one in await self.caller(request).models() if one.model == asked.model]
        if not models:
            raise _unknown_model(asked.model)
        with refused_arguments():
            options = calling.options(options, models[0])
        form = form_of(
            asked,
            partial(calling.reader, models[0]),
            is_named=calling.is_named,
            is_constrained=is_constrained(options),
        )
        return await self._generate(request, asked, prompts, form, writer, options)

    async def embeddings(self, request: Request) -> Response:
        """Return the vectors of texts."""
        asked = await self._asked(request, EmbeddingRequest, "embd-")
        request_id = request.state.request_id
        normalize = asked.normalize is not False
        with refused_arguments(asked.as_sent):
            call = self.caller(request).embed_many(
                asked.model,
                asked.input,
                normalize=normalize,
                prompt_name=asked.input_type if asked.prompt_name is None else asked.prompt_name,
                truncate=asked.truncate,
                request_id=request_id,
            )
            found = await unless_gone(request, call)
        return JSONResponse(embeddings_json(asked, found), headers={_REQUEST_ID: request_id})

    async def predict(self, request: Request) -> Response:
        """Return the prediction for one text or picture, as the page asks for it."""
        asked = await self._asked(request, PredictionRequest, "pred-")
        request_id = request.state.request_id
        with refused_arguments(asked.as_sent):
            call = predict(self.caller(request), asked, request_id)
            found = await unless_gone(request, call)
        return JSONResponse(found, headers={_REQUEST_ID: request_id})

    async def tokenize(self, request: Request) -> Response:
        """Return the tokens of a text or conversation."""
        asked = await self._asked(request, TokenizeRequest, "tokn-")
        return await self._by_one_model(request, asked, tokenize)

    async def detokenize(self, request: Request) -> Response:
        """Return the text of tokens."""
        asked = await self._asked(request, DetokenizeRequest, "tokn-")
        return await self._by_one_model(request, asked, detokenize)

    async def embed(self, request: Request) -> Response:
        """Return the vectors of texts, as TEI does."""
        asked = await self._asked(request, EmbedRequest, "embd-")
        return await self._by_one_model(request, asked, embed)

    async def classify(self, request: Request) -> Response:
        """Return the classes of texts, as TEI does."""
        asked = await self._asked(request, PredictRequest, "pred-")
        return await self._by_one_model(request, asked, classify)

    async def info(self, request: Request) -> Response:
        """Describe the model that TEI's requests are for."""
        models = await self.caller(request).models()
        for capability in ("embed", "classify"):
            for model in models:
                if model.capabilities[0] == capability:
                    return JSONResponse(info_json(model, self._config.max_requests))
        raise _unknown_model("", "embed or classify")

    async def _by_one_model(
        self,
        request: Request,
        asked: OneModelT,
        answer: Callable[[AsyncClient, ModelInfo, OneModelT, str], Coroutine[Any, Any, object]],
    ) -> Response:
        client, request_id = self.caller(request), request.state.request_id
        if (model := asked.found_in(await client.models())) is None:
            raise _unknown_model(asked.model, asked.capability)
        with refused_arguments(asked.as_sent):
            found = await unless_gone(request, answer(client, model, asked, request_id))
        return JSONResponse(found, headers={_REQUEST_ID: request_id})

    async def _asked(self, request: Request, model: type[RequestT], prefix: str) -> RequestT:
        """Return the body of a request, which has an id in every answer from now on.

        That is the one that its client gives it, in a header or the body, or another one.
        """
        header = request.headers.get(_REQUEST_ID, "")
        is_good = _is_id(header)
        request.state.request_id = header if is_good else prefix + uuid.uuid4().hex
        asked = await parsed(request, model, self._config)
        if not is_good and asked.request_id and _is_id(asked.request_id):
            request.state.request_id = asked.request_id
        request.state.as_sent = asked.as_sent
        return asked

    async def _generate(
        self,
        request: Request,
        asked: GenerationRequest,
        prompts: Sequence[Prompt],
        form: Form,
        writer: Writer,
        options: StreamOptions,
    ) -> Response:
        client = self.caller(request)
        request_id = request.state.request_id
        if asked.leaves_search_open:
            found = [one.defaults for one in await client.models() if one.model == asked.model]
            if not any(one.get("strategy") in ("beam", "sampling") for one in found):
                options["strategy"] = "sampling"  # as OpenAI's temperature of 1 does
        options["request_id"] = request_id
        if not asked.stream or asked.comes_whole:
            options["answer_others"] = False  # nobody would get their answers
            known = GenerateOptions.__annotations__  # the others are those of a stream
            whole = {name: value for name, value in options.items() if name in known}
            with refused_arguments(asked.as_sent):
                call = client.generate_many(asked.model, prompts, **cast(GenerateOptions, whole))
                answers = await unless_gone(request, call)
            outputs = [(one, result) for result in answers for one in result.sequences]
            choices = [form.choice(index, *output) for index, output in enumerate(outputs)]
            body = envelope(request_id, form.object, asked.model, choices)
            body |= form.of_prompt(answers[0])
            usage = usage_json(answers.usage)
            if asked.stream:
                return WholeStream(body, usage if asked.has_usage else None)
            body = writer.whole(body | {"usage": usage})
            return JSONResponse(body, headers={_REQUEST_ID: request_id})
        return await self._stream(request, asked, prompts, form, writer, client, options)

    async def _stream(
        self,
        request: Request,
        asked: GenerationRequest,
        prompts: Sequence[Prompt],
        form: Form,
        writer: Writer,
        client: AsyncClient,
        options: StreamOptions,
    ) -> Response:
        """Return a stream that has begun: until then an error has a status of its own."""
        if len(prompts) > _MAX_STREAMS:
            message = f"{len(prompts)} streams are more than {_MAX_STREAMS}; send fewer prompts"
            raise HttpError(400, message, param="prompt")

        def start(place: int, admitted: asyncio.Event) -> AsyncGenerator[Message]:
            found = client.stream_messages(
                asked.model, prompts[place], STREAM_ATTEMPTS, admitted, **options
            )
            return cast(AsyncGenerator[Message], found)

        def as_sent(place: int) -> AsSent:
            return lambda message: asked.as_sent(message.replace("inputs[0]", f"inputs[{place}]"))

        request_id, ping_seconds = request.state.request_id, self._config.ping_seconds
        chunks = [Chunks(form, request_id, asked, place) for place in range(len(prompts))]
        streams = Streams(len(prompts), start)
        streams.begin()
        try:
            await unless_gone(request, streams.wait_until_admitted(ping_seconds))
            if streams.failure is not None:
                place, error = streams.failure
                request.state.as_sent = as_sent(place)
                with refused_arguments(request.state.as_sent):
                    raise error
        except BaseException:
            await streams.end()
            raise
        found = events(streams, chunks, writer, as_sent, has_usage=asked.has_usage)
        return EventStream(streams, found, request_id, ping_seconds)

    def caller(self, request: Request) -> AsyncClient:
        """Return a client that calls on behalf of the sender of the request."""
        return client_as(self._client, request.headers, getattr(request.state, CERTIFIED, None))


def _for_pages(origins: Sequence[str]) -> list[Middleware]:
    """Return what lets pages of other origins ask, where some may."""
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[_REQUEST_ID, "Retry-After"],
        )
    ]


def _is_id(given: str) -> bool:
    return 0 < len(given) <= _MAX_ID and given.isascii() and given.isprintable()


def _unknown_model(name: str, capability: str = "do that") -> HttpError:
    which = f"no model {name!r} is served here" if name else f"no model here can {capability}"
    message = f"{which}; /v1/models lists them"
    return HttpError(404, message, kind="not_found_error", code="model_not_found")


def _model_json(model: ModelInfo) -> dict[str, object]:
    return {
        "id": model.model,
        "object": "model",
        "created": 0,  # a package does not say
        "owned_by": "tokenweir",
        "capabilities": model.capabilities,
        "max_model_len": model.limits.max_input_tokens,
    }


async def _answer_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HttpError), "the table of handlers says so"
    return _failed(request, error)


async def _answer_refused_tensors(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused), "the table of handlers says so"
    status = 404 if error.code is grpc.StatusCode.NOT_FOUND else 400
    return _failed(request, HttpError(status, str(error)))


async def _answer_failure(request: Request, error: Exception) -> Response:
    assert isinstance(error, TokenweirClientError), "the table of handlers says so"
    if (known := error.metadata.get("request_id")) is not None:
        request.state.request_id = known  # the log's: of a stranger the server reads no id
    return _failed(request, http_error(error, getattr(request.state, "as_sent", str)))


async def _answer_wrong_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "the table of handlers says so"
    message = f"{request.method} {request.url.path}: {error.detail}"
    return _failed(request, HttpError(error.status_code, message))


async def _answer_bug(request: Request, error: Exception) -> Response:
    name = getattr(request.state, "request_id", "")
    logger.error("%s fails, request_id=%s; its traceback follows", request.url.path, name)
    message = "the server failed; its log says how"
    return _failed(request, HttpError(500, message, kind="server_error"))


def _failed(request: Request, error: HttpError) -> Response:
    """Return the answer of a failure, with the id of the request if it has one."""
    response = error.response(request.url.path)
    if (request_id := getattr(request.state, "request_id", None)) is not None:
        response.headers[_REQUEST_ID] = request_id
    return response
