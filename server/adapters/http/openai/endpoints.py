"""The endpoints of OpenAI's protocol, and of vLLM's beside it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tokenweir import AsyncClient, GenerateOptions, ModelInfo, StreamOptions

from server.adapters.caller import STREAM_ATTEMPTS, is_serving
from server.adapters.config import HttpConfig
from server.adapters.http.calls import REQUEST_ID, Calls, unless_gone
from server.adapters.http.errors import AsSent, HttpError, refused_arguments, unknown_model
from server.adapters.http.openai.answers import Form, envelope, usage_json
from server.adapters.http.openai.chat import ChatForm, ChatRequest, ConversationRequest
from server.adapters.http.openai.completions import CompletionRequest, TextForm
from server.adapters.http.openai.embeddings import EmbeddingRequest, embed
from server.adapters.http.openai.generation import GenerationRequest
from server.adapters.http.openai.response_writer import ResponseForm, ResponseWriter
from server.adapters.http.openai.responses import ResponsesRequest
from server.adapters.http.openai.streams import (
    Chunks,
    EventStream,
    Message,
    Streams,
    WholeStream,
    Writer,
    events,
)
from server.adapters.http.openai.tokens import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize,
    tokenize,
)
from server.adapters.http.openai.tools import is_constrained

Prompt = str | list[int] | list[dict[str, Any]]
_MAX_STREAMS = 64  # per request


class OpenAiEndpoints:
    """Answers OpenAI's requests by calls of the server behind."""

    def __init__(self, client: AsyncClient, calls: Calls, config: HttpConfig) -> None:
        self._client, self._calls, self._config = client, calls, config

    @property
    def routes(self) -> list[Route]:
        """The routes of the protocol."""
        get, post, calls = ["GET"], ["POST"], self._calls
        embeddings = calls.endpoint(EmbeddingRequest, embed)
        tokens = calls.endpoint(TokenizeRequest, tokenize)
        text = calls.endpoint(DetokenizeRequest, detokenize)
        return [
            Route("/health", self.health, methods=get),
            Route("/v1/models", self.models, methods=get),
            Route("/v1/models/", self.models, methods=get),
            Route("/v1/models/{model:path}", self.model, methods=get),
            Route("/v1/completions", self.completions, methods=post),
            Route("/v1/chat/completions", self.chat, methods=post),
            Route("/v1/responses", self.responses, methods=post),
            Route("/v1/embeddings", embeddings, methods=post),
            Route("/embeddings", embeddings, methods=post),  # as Infinity's clients call it
            Route("/tokenize", tokens, methods=post),
            Route("/detokenize", text, methods=post),
        ]

    async def health(self, request: Request) -> Response:
        """Return whether the server behind serves: 200 or 503."""
        serves = await is_serving(self._client)
        status = "SERVING" if serves else "NOT_SERVING"
        return JSONResponse({"status": status}, 200 if serves else 503)

    async def models(self, request: Request) -> Response:
        """List the models."""
        found = await self._calls.caller(request).models()
        # Clients that are told no name take the first, and most of them generate.
        listed = sorted(found, key=lambda model: "generate" not in model.capabilities)
        return JSONResponse({"object": "list", "data": list(map(_model_json, listed))})

    async def model(self, request: Request) -> Response:
        """Describe one model."""
        return JSONResponse(_model_json(await self._named(request, request.path_params["model"])))

    async def completions(self, request: Request) -> Response:
        """Complete one or more prompts."""
        asked = await self._calls.asked(request, CompletionRequest)
        with refused_arguments():
            options = asked.options
        form, writer = TextForm(asked), Writer()
        return await self._generate(request, asked, asked.prompt, form, writer, options)

    async def chat(self, request: Request) -> Response:
        """Answer in a conversation, with a model that has a chat template."""
        asked = await self._calls.asked(request, ChatRequest)
        return await self._converse(request, asked, asked.messages, ChatForm, Writer())

    async def responses(self, request: Request) -> Response:
        """Answer in a conversation, in the form of OpenAI's responses, of which none is stored."""
        asked = await self._calls.asked(request, ResponsesRequest)
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
        reader = None
        if calling is not None:
            model = await self._named(request, asked.model)
            with refused_arguments():
                options = calling.options(options, model)
            reader = partial(calling.reader, model)
        form = form_of(
            asked,
            reader,
            is_named=calling is not None and calling.is_named,
            is_constrained=is_constrained(options),
        )
        return await self._generate(request, asked, [conversation], form, writer, options)

    async def _named(self, request: Request, name: str) -> ModelInfo:
        """Return the model of a name; HttpError for none."""
        for model in await self._calls.caller(request).models():
            if model.model == name:
                return model
        raise unknown_model(name)

    async def _generate(
        self,
        request: Request,
        asked: GenerationRequest,
        prompts: Sequence[Prompt],
        form: Form,
        writer: Writer,
        options: StreamOptions,
    ) -> Response:
        client = self._calls.caller(request)
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
            return JSONResponse(body, headers={REQUEST_ID: request_id})
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


def _model_json(model: ModelInfo) -> dict[str, object]:
    return {
        "id": model.model,
        "object": "model",
        "created": 0,  # a package does not say
        "owned_by": "tokenweir",
        "capabilities": model.capabilities,
        "max_model_len": model.limits.max_input_tokens,
    }
