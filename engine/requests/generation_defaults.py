"""A package's defaults of generation, for options that a request leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from engine.config import RequestLimits
from engine.requests.checks import check_option
from engine.requests.options import BY_NAME
from engine.requests.request import BeamEnd, LengthPenaltyForm, Strategy

_LIMITS = RequestLimits(max_beam_width=1024)  # a server's defaults, but for beams
_LARGEST = 2**31 - 1  # a whole number of the protocol

Whole = Annotated[int, Field(le=_LARGEST)]
TokenIds = tuple[Whole, ...]


class GenerationDefaults(BaseModel):
    """Options by the names that clients know them by; None or empty says nothing.

    A request that names an option has its own value. Its other options may leave a default without
    meaning: the width of beams, when it samples.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    strategy: Strategy | None = None
    temperature: float | None = None
    top_k: Whole | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    beam: Whole | None = None
    length_penalty: float | None = None
    length_penalty_form: LengthPenaltyForm | None = None
    beam_end: BeamEnd | None = None
    renormalize: bool | None = None
    repetition_penalty: float | None = None
    no_repeat_ngram: Whole | None = None
    encoder_no_repeat_ngram: Whole | None = None
    banned_tokens: TokenIds = ()
    banned_sequences: tuple[TokenIds, ...] = ()
    begin_banned_tokens: TokenIds = ()
    forced_begin: TokenIds = ()
    forced_end: Whole | None = None
    max_new_tokens: Annotated[int, Field(ge=1, le=_LARGEST)] | None = None
    min_new_tokens: Whole | None = None

    @field_validator("*")
    @classmethod
    def _is_possible(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse what no request may have, by the table of options."""
        option = BY_NAME[info.field_name or ""]
        if value is not None and value != ():
            for wrong in check_option(option, value, _LIMITS, vocab_size=_LARGEST + 1):
                place = wrong.field.removeprefix(option.path)
                raise ValueError(f"{option.name}{place}: {wrong.description}")
        return value

    @cached_property
    def given(self) -> Mapping[str, Any]:
        """The defaults that are set, by name."""
        return {name: value for name, value in self if value is not None and value != ()}

    @property
    def largest_ids(self) -> dict[str, int]:
        """The largest id that an option names, by its name."""
        found = {}
        for name, value in self.given.items():
            match BY_NAME[name].kind:
                case "id":
                    found[name] = value
                case "ids" | "run":
                    found[name] = max(value)
                case "runs":
                    found[name] = max(map(max, value))
        return found
