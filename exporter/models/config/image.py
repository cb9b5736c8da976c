"""Options of images."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.package.manifest import MAX_IMAGE_SIZE

ImageSize = Annotated[int, Field(gt=0, le=MAX_IMAGE_SIZE)]


class ImageConfig(BaseModel):
    """What a vision model sees."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    size: ImageSize  # height and width in pixels
    patch_size: ImageSize
    channels: Literal[1, 3] = 3
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # pixel_values = (pixel / 255 - mean) / std
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.size % self.patch_size:
            raise ValueError(f"size ({self.size}) must be a multiple of patch_size")
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise ValueError(f"mean and std need one value for each of {self.channels} channels")
        return self
