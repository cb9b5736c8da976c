"""Tokens of texts and texts of tokens, as vLLM answers them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field
from tokenweir import AsyncClient

from server.adapters.http.openai.answers import token_text
from server.adapters.http.openai.tools import Tool
from server.adapters.http.requests import Json, RequestOfOneModel

_OF_PROMPTS = ("add_special_tokens",)
_OF_CHATS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


class TokenizeRequest(RequestOfOneModel):
    """The body of `/tokenize`: a text, or a conversation."""

    capability = "generate"
    input_field, id_prefix = "prompt", "tokn-"

    prompt: str | None = None
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    return_token_strs: bool | None = None

    def faults(self) -> Iterator[tuple[str, str]]:
        """As the base's, and unless there is one text or conversation."""
        yield from super().faults()
        if (self.prompt is None) == (self.messages is None):
            yield "prompt", "prompt or messages: give one of them, a text or a conversation"

    def as_sent(self, message: str) -> str:
        """As the base's; a conversation is in `messages`."""
        said = super().as_sent(message)
        return said if self.messages is None else said.replace("prompt", "messages", 1)


class DetokenizeRequest(RequestOfOneModel):
    """The body of `/detokenize`."""

    capability = "generate"
    input_field, id_prefix = "tokens", "tokn-"

    tokens: Annotated[list[int], Field(min_length=1)]

    def as_sent(self, message: str) -> str:
        """As the base's; the tokens are sent on as the beginning of an output."""
        return super().as_sent(message).replace("target_prefix", "tokens")


async def tokenize(client: AsyncClient, asked: TokenizeRequest, request_id: str) -> Json:
    """Return the tokens that a model reads."""
    model = await asked.found(client)
    names = _OF_PROMPTS if asked.messages is None else _OF_CHATS
    options: Any = {name: getattr(asked, name) for name in names}
    prompt = asked.messages if asked.prompt is None else asked.prompt
    assert prompt is not None, "the request has one of them"
    found = await client.generate(
        model.model,
        prompt,
        max_new_tokens=0,
        prompt_token_ids=True,
        request_id=request_id,
        **options,
    )
    pieces = map(token_text, found.source_pieces)
    return {
        "count": len(found.prompt_token_ids),
        "max_model_len": model.limits.max_input_tokens,
        "tokens": list(found.prompt_token_ids),
        "token_strs": list(pieces) if asked.return_token_strs else None,
    }


async def detokenize(client: AsyncClient, asked: DetokenizeRequest, request_id: str) -> Json:
    """Return the text of tokens, special ones by their names."""
    model = await asked.found(client)
    found = await client.generate(
        model.model,
        [0],  # any: what is decoded is the given beginning of an output
        target_prefix=asked.tokens,
        max_new_tokens=0,
        skip_special_tokens=False,
        request_id=request_id,
    )
    return {"prompt": found.text}
