"""Requests from a file: of texts, one a line, or of JSON with options, times, sessions, answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, JsonValue, ValidationError

from engine.errors import ConfigError
from engine.lines import read_lines as lines_of
from loadtest.errors import LoadTestError
from loadtest.work.ask import Ask, InTurn, Method, Prompt
from loadtest.work.common import exactly

_MAX_BYTES = 2**28


class Line(BaseModel):
    """A request as a line of the file has it; of the first four exactly one is given.

    The lengths, and `timestamp` in milliseconds, are those of the traces that Mooncake published.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str | list[int] | None = None
    chat: list[dict[str, str]] | None = None
    image: str | None = None  # a file, from the folder of the requests on
    input_tokens: int | None = Field(
        None, ge=1, validation_alias=AliasChoices("input_tokens", "input_length")
    )
    output_tokens: int | None = Field(
        None, ge=1, validation_alias=AliasChoices("output_tokens", "output_length")
    )
    method: Method | None = None
    target: str | list[int] | None = None
    options: dict[str, JsonValue] = {}
    kind: str = ""
    at: float | None = Field(None, ge=0)
    timestamp: float | None = Field(None, ge=0)
    turns: list[str] = []
    answer: dict[str, JsonValue] | None = None
    hash_ids: list[int] | None = None  # a trace's: which of its blocks prompts share; not used

    def to_ask(self, number: int, folder: Path, token_ids: tuple[int, int]) -> Ask:
        """Return the request; ValueError where a line asks for nothing, or for two things."""
        at = self.timestamp / 1000 if self.at is None and self.timestamp is not None else self.at
        exact = {} if self.output_tokens is None else exactly(self.output_tokens)
        return Ask(
            self._prompt(number, folder, token_ids),
            method=self.method,
            target=tuple(self.target) if isinstance(self.target, list) else self.target,
            options={**exact, **self.options},
            kind=self.kind,
            at=at,
            turns=tuple(self.turns),
            expected=self.answer,
        )

    def _prompt(self, number: int, folder: Path, token_ids: tuple[int, int]) -> Prompt:
        given = (self.prompt, self.chat, self.image, self.input_tokens)
        if sum(one is not None for one in given) != 1:
            raise ValueError("give one of prompt, chat, image and input_tokens")
        if self.image is not None:
            if not (path := folder / self.image).is_file():
                raise ValueError(f"image {self.image} is no file in {folder}")
            return path
        if self.chat is not None:
            return tuple(self.chat)
        if self.prompt is not None:
            return self.prompt if isinstance(self.prompt, str) else tuple(self.prompt)
        drawn = np.random.default_rng((0, number))
        return tuple(drawn.integers(token_ids[0], token_ids[1] + 1, self.input_tokens).tolist())


def read_requests(path: Path, token_ids: tuple[int, int] = (100, 999)) -> InTurn:
    """Return the requests of a file, used in turn; LoadTestError names the line that is wrong.

    `token_ids` are the least and the largest of which a prompt is made that has only a length.
    """
    asks = []
    for number, text in enumerate(read_lines(path), start=1):
        try:
            asks.append(Line.model_validate_json(text).to_ask(number, path.parent, token_ids))
        except ValidationError as error:
            wrong = error.errors()[0]
            place = ".".join(map(str, wrong["loc"])) or "the line"
            raise LoadTestError(f"{path}, request {number}: {place}: {wrong['msg']}") from error
        except ValueError as error:
            raise LoadTestError(f"{path}, request {number}: {error}") from error
    if all(ask.at is not None for ask in asks):
        asks.sort(key=lambda ask: ask.at or 0.0)
    return InTurn(f"{path.name}: {len(asks)} requests in turn", tuple(asks))


def read_lines(path: Path) -> tuple[str, ...]:
    """Return the lines of a UTF-8 file that are not blank; LoadTestError if there are none."""
    try:
        prompts = tuple(line for line in lines_of(path, _MAX_BYTES) if line.strip())
    except ConfigError as error:
        raise LoadTestError(str(error)) from error
    if not prompts:
        raise LoadTestError(f"{path} has no prompt; write one a line")
    return prompts
