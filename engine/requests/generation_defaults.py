"""What a package gives to requests that leave an option of generation away."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from engine.config import RequestLimits
from engine.requests.bounds import (
    MAX_LENGTH_PENALTY,
    MAX_REPETITION_PENALTY,
    MIN_REPETITION_PENALTY,
)
from engine.requests.request import BeamEnd, Strategy

_LIMITS = RequestLimits()  # of a server that names none
_MOST_BEAMS = 1024  # whatever a server allows

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[tuple[TokenId, ...], Field(max_length=_LIMITS.max_banned_tokens)]
Size = Annotated[int, Field(ge=0, lt=2**31)]
AboveZero = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Penalty = Annotated[float, Field(ge=0, le=MAX_LENGTH_PENALTY)]
Exponent = Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY)]
Repetition = Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)]


class GenerationDefaults(BaseModel):
    """Options by the names that clients know them by; None or empty says nothing.

    A request that names an option has its own value. What it asks for besides may leave a default
    without meaning: the width of beams, when it samples.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    strategy: Strategy | None = None
    temperature: AboveZero | None = None
    top_k: Size | None = None
    top_p: Share | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    typical_p: Share | None = None
    beam: Annotated[int, Field(gt=0, le=_MOST_BEAMS)] | None = None
    length_penalty: Penalty | None = None
    length_power: Exponent | None = None
    beam_end: BeamEnd | None = None
    renormalize: bool | None = None
    repetition_penalty: Repetition | None = None
    no_repeat_ngram: Size | None = None
    encoder_no_repeat_ngram: Size | None = None
    banned_tokens: TokenIds = ()
    banned_sequences: Annotated[
        tuple[Annotated[TokenIds, Field(min_length=1)], ...],
        Field(max_length=_LIMITS.max_banned_tokens),
    ] = ()
    begin_banned_tokens: TokenIds = ()
    forced_begin: Annotated[TokenIds, Field(max_length=_LIMITS.max_forced_tokens)] = ()
    forced_end: TokenId | None = None
    max_new_tokens: Annotated[int, Field(gt=0, lt=2**31)] | None = None
    min_new_tokens: Size | None = None

    @cached_property
    def given(self) -> Mapping[str, Any]:
        """What it says, by name."""
        return {name: value for name, value in self if value is not None and value != ()}

    @property
    def largest_ids(self) -> dict[str, int]:
        """The largest id that an option names, by its name."""
        runs = [token_id for run in self.banned_sequences for token_id in run]
        named = {
            "banned_tokens": self.banned_tokens,
            "banned_sequences": runs,
            "begin_banned_tokens": self.begin_banned_tokens,
            "forced_begin": self.forced_begin,
            "forced_end": () if self.forced_end is None else (self.forced_end,),
        }
        return {name: max(ids) for name, ids in named.items() if ids}
