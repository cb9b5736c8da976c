"""Answers of our server in the JSON of OpenAI's completions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from tokenweir import GeneratedSequence, PositionLogprobs, Result, Usage
from tokenweir.v1 import common_pb2

from server.adapters.http.requests import Json

Positions = Sequence[PositionLogprobs] | Sequence[common_pb2.PositionLogprobs]

# Others, of a request that takes a part of an answer, keep their names.
_REASONS: Mapping[str, str] = {"eos": "stop", "context_full": "length"}
_IMPOSSIBLE = -9999.0


class Form(Protocol):
    """The differences between completions of texts and those of conversations."""

    object: str
    chunk_object: str
    has_prompts_in_choices: bool  # or beside them, since there is one prompt

    def choice(self, index: int, sequence: GeneratedSequence, result: Result) -> Json:
        """Return one output, which is one of a prompt's result."""
        ...

    def of_prompt(self, result: Result) -> Json:
        """Return what a whole answer says of its prompt, beside the choices."""
        ...

    def first(self, index: int, reasoning: str) -> Json | None:
        """Return what a stream of one output begins with, if it does; see Result.reasoning."""
        ...

    def piece(self, index: int, text: str, positions: Positions, offset: int) -> Iterator[Json]:
        """Yield what the next piece of an output comes to; `offset` characters came before it."""
        ...

    def last(self, index: int, reason: str) -> Iterator[Json]:
        """Yield the end of the stream of one output."""
        ...


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
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def prompt_json(result: Result, *, with_logprobs: bool, with_ids: bool) -> Json:
    """Return what vLLM tells of a prompt: log-probabilities by id, ids."""
    found: Json = {}
    if with_logprobs:
        found["prompt_logprobs"] = [None, *map(_by_id, result.prompt_logprobs)]
    if with_ids:
        found["prompt_token_ids"] = list(result.prompt_token_ids)
    return found


def _by_id(position: PositionLogprobs) -> Json:
    return {
        str(one.token_id): {
            "logprob": finite(one.logprob),
            "rank": one.rank,
            "decoded_token": token_text(one.piece),
        }
        for one in (position.chosen, *position.top)
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


def num_chars(piece: bytes) -> int:
    """Return how many characters of UTF-8 begin in a piece."""
    return sum(byte & 0xC0 != 0x80 for byte in piece)
