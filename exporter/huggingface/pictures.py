"""Reads how transformers makes numbers of a picture: `preprocessor_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

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

Size = PositiveInt | dict[str, PositiveInt]


class Preprocessor(BaseModel):
    """`preprocessor_config.json`, with the defaults of a ViT."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    do_resize: bool = True
    size: Size = 224
    resample: int = 2
    do_center_crop: bool = False
    crop_size: Size = 224
    do_rescale: bool = True
    rescale_factor: float = 1 / _FULL
    do_normalize: bool = True
    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def image_options(self, size: int, channels: int) -> dict[str, Any]:
        """Return options of an ImageConfig; ValueError if a model of `size` takes no such ones."""
        edge, keep_ratio = _edge("size", self.size) if self.do_resize else (size, False)
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
            means, deviations = self.image_mean, self.image_std
        return tuple(mean / most for mean in means), tuple(std / most for std in deviations)


def listed_keys() -> str:
    """Return the numbers of the filters that are known."""
    return ", ".join(map(str, _RESAMPLES))


def _edge(name: str, given: Size) -> tuple[int, bool]:
    """Return the edge of a square, or of the shorter edge and True."""
    if isinstance(given, int):
        return given, False
    if set(given) == {"shortest_edge"}:
        return given["shortest_edge"], True
    if set(given) == {"height", "width"} and given["height"] == given["width"]:
        return given["height"], False
    raise ValueError(
        f"{name} is {shortened(str(given))}; supported: a square, or shortest_edge with a crop"
    )
