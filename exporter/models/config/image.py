"""Options of images."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from engine.package.manifest import MAX_IMAGE_SIZE, Resample
from exporter.models.config.sizes import Options

ImageSize = Annotated[int, Field(gt=0, le=MAX_IMAGE_SIZE)]


class ImageConfig(Options):
    """The images that a vision model reads."""

    size: ImageSize  # height and width in pixels
    patch_size: ImageSize
    channels: Literal[1, 3] = 3
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # pixel_values = (pixel / 255 - mean) / std
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    # Height and width that a picture gets before its middle is cut out; None: `size`
    resize: ImageSize | None = None
    keep_ratio: bool = False  # only its shorter edge becomes that
    resample: Resample = "bilinear"
    # DeiT: a second token beside the class token; with a head, its logits and the class token's
    # are averaged
    distillation: Literal["none", "token", "head"] = "none"

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
        problems = []
        if self.size % self.patch_size:
            problems.append(f"size ({self.size}) must be a multiple of patch_size")
        if {len(self.mean), len(self.std)} != {self.channels}:
            problems.append(f"mean and std need one value for each of {self.channels} channels")
        if problems:
            raise ValueError("; ".join(problems))
        return self
