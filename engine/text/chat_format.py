"""How a conversation becomes a text: `chat.json` of a checkpoint and of a package."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate, islice, pairwise
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from engine.json_file import parse_object, read_bounded
from engine.wording import problems_of

CHAT_NAME = "chat.json"
MAX_TEMPLATE_CHARS = 2**17  # the longest that are known have a quarter of it
_MAX_BYTES = 2**20
THINK, THINK_END = "<think>", "</think>"  # around what a model says to itself
# How calls of functions are written: <tool_call>{...}</tool_call>; {"name": ..., "parameters": ...}
# alone; [TOOL_CALLS][{...}].
ToolFormat = Literal["hermes", "llama3_json", "mistral"]


def num_reasoning_tokens(pieces: Sequence[bytes], *, is_begun: bool, num_given: int = 0) -> int:
    """Return how many tokens of an answer stand between the marks; `is_begun` as in a prompt.

    The first ones may be given: they are not counted.
    """
    text, mark = b"".join(pieces), THINK.encode()
    first = 0 if is_begun else text.find(mark) + len(mark)
    if not is_begun and not text.lstrip().startswith(mark):
        return 0
    last = text.find(THINK_END.encode())
    places = pairwise(accumulate(map(len, pieces), initial=0))
    made = islice(places, num_given, None)
    return sum(first <= start and (last < 0 or end <= last) for start, end in made)


class ChatFormat(BaseModel):
    """A template of Jinja, and what it can name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    template: Annotated[str, Field(max_length=MAX_TEMPLATE_CHARS)]
    tokens: dict[str, str] = {}  # `bos_token` and others
    variables: dict[str, JsonValue] = {}  # for requests that do not set them
    tool_format: ToolFormat | None = None  # None: the model calls none, or in another format


def read_chat_format(path: str | os.PathLike[str]) -> ChatFormat:
    """Read a `chat.json`; ValueError says what is wrong with it."""
    try:
        return ChatFormat.model_validate(parse_object(read_bounded(path, _MAX_BYTES)))
    except ValidationError as error:
        raise ValueError(problems_of(error, CHAT_NAME)) from error
