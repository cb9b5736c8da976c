"""Completions of texts: what OpenAI's requests for them say, and the form of their answers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from tokenweir import (
    GeneratedSequence,
    PositionLogprobs,
    Result,
    StreamOptions,
    TokenLogprob,
)
from tokenweir.v1 import common_pb2

from server.adapters.http.errors import HttpError
from server.adapters.http.openai.answers import (
    Positions,
    finish_reason,
    finite,
    num_chars,
    prompt_json,
    token_text,
)
from server.adapters.http.openai.generation import GenerationRequest
from server.adapters.http.openai.token_texts import TokenTexts
from server.adapters.http.requests import Json, Prompts


class CompletionRequest(GenerationRequest):
    """The body of `/v1/completions`."""

    input_field, id_prefix = "prompt", "cmpl-"

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None

    @property
    def num_inputs(self) -> int:
        """How many prompts it has."""
        return len(self.prompt)

    @property
    def comes_whole(self) -> bool:
        """As the base's: where the tokens of a prompt are echoed, which come with the end."""
        return bool(self.echo) and (self.logprobs is not None or self.echoes_tokens)

    @property
    def options(self) -> StreamOptions:
        """As the base's; `best_of` that chooses nothing is left out."""
        said = super().options
        if self.best_of == (self.n or 1):
            said.pop("best_of", None)
        if self.comes_whole:
            said["prompt_token_ids"] = True
        if self.echo and self.logprobs is not None:
            said.setdefault("prompt_logprobs", self.logprobs)
        return said

    @property
    def echoes_tokens(self) -> bool:
        """Whether an echo is the text of the tokens that are read, which no text was sent of."""
        is_cut = self.extra.get("truncate_prompt_tokens") is not None
        return is_cut or not isinstance(self.prompt[0], str)

    def as_sent(self, message: str) -> str:
        """As the base's; `logprobs` that are of the prompt, too, are named once."""
        return re.sub(r"^(.+); \1$", r"\1", super().as_sent(message))

    def _apart(self) -> set[str]:
        return {"prompt", "echo"}

    def _sent_names(self) -> dict[str, str]:
        names = super()._sent_names()
        if self.prompt_logprobs is None:
            names["prompt_logprobs"] = "logprobs"
        return names


class TextForm:
    """Completions of texts."""

    object, chunk_object = "text_completion", "text_completion"
    has_prompts_in_choices = True

    def __init__(self, asked: CompletionRequest) -> None:
        self._asked = asked

    def choice(self, index: int, sequence: GeneratedSequence, result: Result) -> Json:
        asked, text = self._asked, sequence.text
        logprobs = _logprobs(sequence.logprobs, 0)
        if asked.echo:
            echoed = self._echoed(index, result)
            text = echoed.decode(errors="replace") + text
            if asked.logprobs is not None:
                logprobs = _echoed_logprobs(echoed, sequence, result)
        found = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason(sequence.finish_reason),
        }
        if asked.return_token_ids:
            found["token_ids"] = list(sequence.token_ids)
        return found | prompt_json(
            result,
            with_logprobs=asked.prompt_logprobs is not None,
            with_ids=bool(asked.return_token_ids),
        )

    def of_prompt(self, result: Result) -> Json:
        return {}  # there may be several, and each choice says it

    def first(self, index: int, reasoning: str) -> Json | None:
        if not self._asked.echo:
            return None
        text = self._prompt(index)
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def piece(self, index: int, text: str, positions: Positions, offset: int) -> Iterator[Json]:
        logprobs = _logprobs(positions, offset)
        yield {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def last(self, index: int, reason: str) -> Iterator[Json]:
        yield {"index": index, "text": "", "logprobs": None, "finish_reason": reason}

    def _prompt(self, index: int) -> str:
        """Return the text that an output continues."""
        return str(self._asked.prompt[index // (self._asked.n or 1)])

    def _echoed(self, index: int, result: Result) -> bytes:
        if self._asked.echoes_tokens:
            return b"".join(result.source_pieces)
        return self._prompt(index).encode()


def _echoed_logprobs(echoed: bytes, sequence: GeneratedSequence, result: Result) -> Json:
    """Return the log-probabilities of a prompt and of what continues it."""
    ids, pieces = result.prompt_token_ids, result.source_pieces
    if len(result.prompt_logprobs) != len(ids) - 1:  # they are of its beginning of the output
        raise HttpError(
            400,
            "echo with logprobs is for models that continue their prompt, and this one writes "
            "another text; leave one of the two out",
            param="echo",
        )
    first = PositionLogprobs(TokenLogprob(ids[0], pieces[0], 0.0, 1), ())
    positions = (first, *result.prompt_logprobs, *sequence.logprobs)
    found = _logprobs(positions, 0) or {}
    found["token_logprobs"][0] = None  # no token before it could predict it
    behind = [len(echoed.decode(errors="replace"))]
    for position in sequence.logprobs:
        behind.append(behind[-1] + num_chars(position.chosen.piece))
    parts = TokenTexts().push(echoed.decode(errors="replace"), pieces)
    starts = accumulate(map(len, parts[:-1]), initial=0)
    found["text_offset"] = [*starts, *behind[:-1]]
    return found


def _logprobs(positions: Positions, offset: int) -> Json | None:
    if not positions:
        return None
    found: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for position in positions:
        names = _names([*position.top, position.chosen])
        found["tokens"].append(names[-1])
        found["token_logprobs"].append(finite(position.chosen.logprob))
        found["text_offset"].append(offset)
        offset += num_chars(position.chosen.piece)
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
