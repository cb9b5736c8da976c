"""Options of norms."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from exporter.models.config.sizes import SizeOptions


class NormOptions(SizeOptions):
    """Which norm, and where."""

    norm: Literal["layer", "rms"] = "layer"
    # both: the sublayer's output has a norm of its own before it is added
    norm_position: Literal["first", "last", "both"] = "last"
    norm_bias: bool = True  # layer norms only
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    final_norm: bool | None = None  # a norm after the last layer; None: unless they are last
    # The first layer's, before its attention; ModernBERT: the embedding's norm stands there
    first_norm: bool = True

    @property
    def has_final_norm(self) -> bool:
        """Whether there is a norm after the last layer."""
        return self.norm_position != "last" if self.final_norm is None else self.final_norm
