"""The code of an original that computes a model in place of our blocks."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from engine.package.manifest import MAX_LAYERS
from engine.wording import shortened

_NOT_PLAIN = ("quantization_config", "auto_map")  # rounded weights, and code of strangers
_LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


class OriginalCode(BaseModel):
    """From what a model is built whose blocks are those of transformers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Annotated[str, Field(pattern=r"^\d+\.\d+")]  # transformers' own
    config: dict[str, Any]  # `config.json` of the original

    @field_validator("config")
    @classmethod
    def _is_plain(cls, given: dict[str, Any]) -> dict[str, Any]:
        if refused := [name for name in _NOT_PLAIN if given.get(name)]:
            raise ValueError(f"{' and '.join(refused)} is not supported")
        try:
            json.dumps(given, allow_nan=False)
        except ValueError as error:
            raise ValueError(
                "numbers that are not finite (NaN, Infinity) are no options"
            ) from error
        for name in _LAYER_COUNTS:  # transformers makes lists as long
            if name in given and given[name] not in range(1, MAX_LAYERS + 1):
                said = f"{name} is {shortened(given[name])}"
                raise ValueError(f"{said}; supported: 1 to {MAX_LAYERS:,}")
        return given
