"""Answers of our server in the JSON of OpenAI's completions."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from tokenweir import GeneratedSequence, PositionLogprobs, TokenLogprob, Usage
from tokenweir.v1 import common_pb2

Positions = Sequence[PositionLogprobs] | Sequence[common_pb2.PositionLogprobs]
Json = dict[str, Any]

# Others, of a request that takes a part of an answer, keep their names.
_REASONS: Mapping[str, str] = {"eos": "stop", "context_full": "length"}
_IMPOSSIBLE = -9999.0


class Form(Protocol):
    """The differences between completions of texts and those of conversations."""

    prefix: str  # begins the ids
    object: str
    chunk_object: str

    def choice(self, index: int, sequence: GeneratedSequence) -> Json:
        """Return one output."""
        ...

    def first(self, index: int) -> Json | None:
        """Return what a stream of one output begins with, if it does."""
        ...

    def piece(self, index: int, text: str, positions: Positions, offset: int) -> Iterator[Json]:
        """Yield what the next piece of an output comes to; `offset` characters came before it."""
        ...

    def last(self, index: int, reason: str) -> Iterator[Json]:
        """Yield the end of the stream of one output."""
        ...


class TextForm:
    """Completions of texts."""

    prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def choice(self, index: int, sequence: GeneratedSequence) -> Json:
        return {
            "index": index,
            "text": sequence.text,
            "logprobs": _text_logprobs(sequence.logprobs, 0),
            "finish_reason": finish_reason(sequence.finish_reason),
        }

    def first(self, index: int) -> Json | None:
        return None

    def piece(self, index: int, text: str, positions: Positions, offset: int) -> Iterator[Json]:
        logprobs = _text_logprobs(positions, offset)
        yield {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def last(self, index: int, reason: str) -> Iterator[Json]:
        yield {"index": index, "text": "", "logprobs": None, "finish_reason": reason}


def envelope(request_id: str, kind: str, model: str, choices: Sequence[Json]) -> Json:
    """Return what stands around the choices, of a whole answer or of a piece of it."""
    return {
        "id": request_id,
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": list(choices),
    }


def usage_json(usage: Usage | common_pb2.Usage) -> Json:
    """Return what was consumed."""
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.input_tokens + usage.output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_input_tokens},
    }


def finish_reason(ours: str) -> str:
    """Return what OpenAI calls the end of an output."""
    return _REASONS.get(ours, ours)


def finite(logprob: float) -> float:
    """Return a log-probability that JSON has: OpenAI's -9999 for a token that cannot come."""
    return max(logprob, _IMPOSSIBLE)


def token_text(piece: bytes) -> str:
    """Return the text of a token; of one that is no whole characters its bytes, as OpenAI does."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _text_logprobs(positions: Positions, offset: int) -> Json | None:
    if not positions:
        return None
    found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for position in positions:
        names = _names([*position.top, position.chosen])
        found["tokens"].append(names[-1])
        found["token_logprobs"].append(finite(position.chosen.logprob))
        found["text_offset"].append(offset)
        offset += len(position.chosen.piece.decode(errors="ignore"))
        numbers = [finite(one.logprob) for one in (*position.top, position.chosen)]
        is_asked = bool(position.top)
        found["top_logprobs"].append(dict(zip(names, numbers, strict=True)) if is_asked else None)
    return found


def _names(tokens: Sequence[TokenLogprob | common_pb2.TokenLogprob]) -> list[str]:
    """Return what tells tokens of a position apart: their texts, or as vLLM does their ids.

    It is one where a token has no text, or another one the same.
    """
    ids = [one.token_id if isinstance(one, TokenLogprob) else one.id for one in tokens]
    texts = [token_text(one.piece) for one in tokens]
    count = Counter(text for _, text in {*zip(ids, texts, strict=True)})
    return [
        text if text and count[text] == 1 else f"token_id:{token_id}"
        for token_id, text in zip(ids, texts, strict=True)
    ]
