"""Types of options, with the bounds that all have, and the base of their groups."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from engine.package.manifest import MAX_HEADS, MAX_LAYERS, MAX_LENGTH, MAX_VOCAB_SIZE, MAX_WIDTH

NumLayers = Annotated[int, Field(ge=0, le=MAX_LAYERS)]
NumHeads = Annotated[int, Field(gt=0, le=MAX_HEADS)]
Width = Annotated[int, Field(gt=0, le=MAX_WIDTH)]
Length = Annotated[int, Field(ge=0, le=MAX_LENGTH)]
VocabSize = Annotated[int, Field(ge=0, le=MAX_VOCAB_SIZE)]
TokenId = Annotated[int, Field(ge=0, lt=MAX_VOCAB_SIZE)]
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]
PositiveFloat = Annotated[float, Field(gt=0)]
Probability = Annotated[float, Field(ge=0, lt=1)]


class Options(BaseModel):
    """Options that are read from a file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
