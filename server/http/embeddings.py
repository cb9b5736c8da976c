"""Embeddings: what OpenAI's requests for them say, and their answers."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import Literal

from tokenweir import Answers

from server.http.requests import OpenAiRequest, Prompts, listed


class EmbeddingRequest(OpenAiRequest):
    """The body of `/v1/embeddings`."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    normalize: bool = True  # our own: to length 1, as OpenAI's vectors are

    @property
    def items(self) -> list[str | list[int]]:
        """The texts or token ids, one or more."""
        return listed(self.input)


def embeddings_json(
    asked: EmbeddingRequest, found: Answers[tuple[float, ...]]
) -> dict[str, object]:
    """Return the vectors as numbers, or as the bytes of float32 in base64."""
    is_plain = asked.encoding_format == "float"
    tokens = found.usage.input_tokens
    return {
        "object": "list",
        "model": asked.model,
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": list(vector) if is_plain else _base64(vector),
            }
            for index, vector in enumerate(found.results)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _base64(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()
