"""Reads how transformers makes numbers of a picture: `preprocessor_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from engine.package.manifest import Resample
from engine.wording import shortened
from exporter.models.config import PositiveInt

PREPROCESSOR_NAME = "preprocessor_config.json"
_RESAMPLES: Mapping[int, Resample] = {  # by Pillow's numbers
    0: "nearest",
    1: "lanczos",
    2: "bilinear",
    3: "bicubic",
    4: "box",
    5: "hamming",
}
_FULL = 255
_OF_DEIT = {"size": 256, "do_center_crop": True, "resample": 3}  # where its file does not say

Size = PositiveInt | dict[str, PositiveInt] | tuple[PositiveInt, PositiveInt]


class Preprocessor(BaseModel):
    """`preprocessor_config.json`, with the defaults of a ViT or, by its class, of a DeiT."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    do_resize: bool = True
    size: Size = 224
    default_to_square: bool = True  # what a size of one number means
    resample: int = 2
    do_center_crop: bool = False
    crop_size: Size = 224
    do_rescale: bool = True
    rescale_factor: float = 1 / _FULL
    do_normalize: bool = True
    image_mean: float | tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: float | tuple[float, ...] = (0.5, 0.5, 0.5)
    do_pad: Literal[False] = False
    crop_pct: None = None

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, given: dict[str, Any]) -> dict[str, Any]:
        steps = {name: False for name in given if name.startswith("do_")}  # what a null is of one
        said = steps | {name: value for name, value in given.items() if value is not None}
        kind = said.get("image_processor_type", said.get("feature_extractor_type"))
        return {**_OF_DEIT, **said} if str(kind).startswith("DeiT") else said

    def image_options(self, size: int, channels: int) -> dict[str, Any]:
        """Return options of an ImageConfig; ValueError if a model of `size` takes no such ones."""
        edge, keep_ratio = (size, False)
        if self.do_resize:
            edge, keep_ratio = _edge("size", self.size, is_square=self.default_to_square)
        seen = _edge("crop_size", self.crop_size)[0] if self.do_center_crop else edge
        if seen != size or (keep_ratio and not self.do_center_crop):
            raise ValueError(
                f"{PREPROCESSOR_NAME} makes pictures of {seen} pixels"
                f"{' and their own ratio' if keep_ratio else ''}, the model has an image_size of "
                f"{size}; save the image processor that it was trained with"
            )
        if self.resample not in _RESAMPLES:
            raise ValueError(f"resample is {self.resample}; supported: {listed_keys()}")
        mean, std = self._shift_and_scale(channels)
        return {
            "mean": mean,
            "std": std,
            "resize": None if edge == size and not keep_ratio else edge,
            "keep_ratio": keep_ratio,
            "resample": _RESAMPLES[self.resample],
        }

    def _shift_and_scale(self, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and deviation of pixels between 0 and 1, whatever they were scaled to."""
        most = _FULL * self.rescale_factor if self.do_rescale else _FULL
        means, deviations = (0.0,) * channels, (1.0,) * channels
        if self.do_normalize:
            means, deviations = (
                (given,) * channels if isinstance(given, float) else given
                for given in (self.image_mean, self.image_std)
            )
        return tuple(mean / most for mean in means), tuple(std / most for std in deviations)


def listed_keys() -> str:
    """Return the numbers of the filters that are known."""
    return ", ".join(map(str, _RESAMPLES))


def _edge(name: str, given: Size, *, is_square: bool = True) -> tuple[int, bool]:
    """Return the edge of a square, or of the shorter edge and True."""
    if isinstance(given, int):
        return given, not is_square
    if isinstance(given, tuple):
        given = dict(zip(("height", "width"), given, strict=True))
    if set(given) == {"shortest_edge"}:
        return given["shortest_edge"], True
    if set(given) == {"height", "width"} and given["height"] == given["width"]:
        return given["height"], False
    raise ValueError(
        f"{name} is {shortened(str(given))}; supported: a square, or shortest_edge with a crop"
    )
