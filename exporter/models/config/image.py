"""Options of images."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from engine.package.manifest import MAX_IMAGE_SIZE, Resample
from exporter.models.config.sizes import unless

ImageSize = Annotated[int, Field(gt=0, le=MAX_IMAGE_SIZE)]


class ImageConfig(BaseModel):
    """What a vision model sees."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    size: ImageSize  # height and width in pixels
    patch_size: ImageSize
    channels: Literal[1, 3] = 3
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # pixel_values = (pixel / 255 - mean) / std
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    # What a picture's height and width become before its middle is seen; None: `size`
    resize: Annotated[ImageSize | None, unless(None)] = None
    keep_ratio: Annotated[bool, unless(False)] = False  # only its shorter edge becomes that
    resample: Annotated[Resample, unless("bilinear")] = "bilinear"
    # DeiT: a second token beside the class token; with a head, its logits and the class token's
    # are averaged
    distillation: Annotated[Literal["none", "token", "head"], unless("none")] = "none"

    @property
    def num_special(self) -> int:
        """Tokens before the patches."""
        return 1 if self.distillation == "none" else 2

    @property
    def num_tokens(self) -> int:
        """Patches, and the tokens before them."""
        return (self.size // self.patch_size) ** 2 + self.num_special

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.size % self.patch_size:
            raise ValueError(f"size ({self.size}) must be a multiple of patch_size")
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise ValueError(f"mean and std need one value for each of {self.channels} channels")
        return self
