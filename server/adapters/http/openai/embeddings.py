"""Embeddings: what OpenAI's requests for them say, and their answers."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import PlainValidator
from tokenweir import AsyncClient, Truncate

from server.adapters.http.errors import HttpError
from server.adapters.http.requests import Json, ModelRequest, Prompts


def _side(value: object) -> Truncate | None:
    """Return the side that is cut off texts which are too long."""
    match value:
        case None | False:
            return None
        case True | "right" | "left":
            return "left" if value == "left" else "right"
    raise ValueError("give true, false, left or right")


_Truncate = Annotated[Truncate | None, PlainValidator(_side)]
_OTHER_IDS = (
    "ids are those of this model's own tokenizer: send texts (LangChain does, with "
    "check_embedding_ctx_length=False)"
)


class EmbeddingRequest(ModelRequest):
    """The body of `/v1/embeddings`."""

    input_field, id_prefix = "input", "embd-"

    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None  # those of the model
    truncate: _Truncate = None  # as text-embeddings-inference has it; true: "right"
    prompt_name: str | None = None  # the model's prompt in front of each text
    input_type: str | None = None  # the same under another name
    normalize: bool | None = None  # our own; absent: to length 1, as OpenAI's vectors are

    def faults(self) -> Iterator[tuple[str, str]]:
        """As the base's, and for a prompt that is named twice."""
        yield from super().faults()
        if None not in (self.prompt_name, self.input_type):
            yield "input_type", "input_type, prompt_name: give one of them only"

    @property
    def num_inputs(self) -> int:
        """How many texts it has."""
        return len(self.input)

    def _sent_names(self) -> dict[str, str]:
        named = {} if self.input_type is None else {"prompt_name": "input_type"}
        return super()._sent_names() | named

    def as_sent(self, message: str) -> str:
        """As the base's; ids that the model does not have are most often another tokenizer's."""
        said = super().as_sent(message)
        return f"{said}; {_OTHER_IDS}" if "outside the vocabulary" in message else said


async def embed(client: AsyncClient, asked: EmbeddingRequest, request_id: str) -> Json:
    """Return the vectors as numbers, or as the bytes of float32 in base64.

    Raises HttpError where they have another size than was asked for.
    """
    found = await client.embed_many(
        asked.model,
        asked.input,
        normalize=asked.normalize is not False,
        prompt_name=asked.input_type if asked.prompt_name is None else asked.prompt_name,
        truncate=asked.truncate,
        request_id=request_id,
    )
    size = len(found.results[0])
    if asked.dimensions not in (None, size):
        message = f"dimensions: {asked.dimensions} are not the {size} that this model gives"
        raise HttpError(400, f"{message}; leave it out", param="dimensions")
    is_plain = asked.encoding_format != "base64"
    tokens = found.usage.input_tokens
    return {
        "object": "list",
        "model": asked.model,
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": list(vector)
                if is_plain
                else base64.b64encode(struct.pack(f"<{size}f", *vector)).decode(),
            }
            for index, vector in enumerate(found.results)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
