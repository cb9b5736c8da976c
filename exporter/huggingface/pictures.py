"""The steps of transformers' image processor for a picture, in our terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from PIL import Image
from pydantic import BaseModel, ConfigDict, ValidationError

from engine.wording import problems_of, shortened
from exporter.huggingface.family import refused
from exporter.models.config import PositiveInt

PREPROCESSOR_NAME = "preprocessor_config.json"
_FULL = 255


class _Settings(BaseModel):
    """Settings of an image processor, none of which is None."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    do_resize: bool
    size: dict[str, PositiveInt]
    resample: int
    do_center_crop: bool = False
    crop_size: dict[str, PositiveInt] = {}
    do_rescale: bool
    rescale_factor: float
    do_normalize: bool
    image_mean: float | tuple[float, ...]
    image_std: float | tuple[float, ...]
    do_pad: Literal[False] = False
    crop_pct: None = None


def image_options(processor: Any, size: int, channels: int) -> dict[str, Any]:
    """Return options of an ImageConfig; ValueError if a model of `size` takes no such pictures."""
    names = _Settings.model_fields
    given: dict[str, Any] = {name: getattr(processor, name, None) for name in names}
    sizes = {name: dict(given[name]) for name in ("size", "crop_size") if given[name]}
    known = {name: value for name, value in {**given, **sizes}.items() if value is not None}
    try:
        settings = _Settings.model_validate(known)
    except ValidationError as error:
        raise ValueError(f"{PREPROCESSOR_NAME}: {problems_of(error, '')}") from error
    edge, keep_ratio = (size, False)
    if settings.do_resize:
        edge, keep_ratio = _edge("size", settings.size)
    seen = _edge("crop_size", settings.crop_size)[0] if settings.do_center_crop else edge
    if seen != size or (keep_ratio and not settings.do_center_crop):
        raise ValueError(
            f"{PREPROCESSOR_NAME} makes pictures of {seen} pixels"
            f"{' and their own ratio' if keep_ratio else ''}, the model has an image_size of "
            f"{size}; save the image processor that it was trained with"
        )
    known_filters = sorted(map(int, Image.Resampling))
    if settings.resample not in known_filters:
        raise ValueError(refused("resample", settings.resample, tuple(known_filters)))
    # Mean and deviation of pixels between 0 and 1, whatever they were scaled to.
    most = _FULL * settings.rescale_factor if settings.do_rescale else _FULL
    mean, std = (
        (one,) * channels if isinstance(one, float) else one
        for one in (settings.image_mean, settings.image_std)
    )
    if not settings.do_normalize:
        mean, std = (0.0,) * channels, (1.0,) * channels
    if not all(one > 0 for one in std):
        raise ValueError(
            f"{PREPROCESSOR_NAME}: image_std is {shortened(str(std))}; supported: above 0"
        )
    return {
        "mean": tuple(one / most for one in mean),
        "std": tuple(one / most for one in std),
        "resize": None if edge == size and not keep_ratio else edge,
        "keep_ratio": keep_ratio,
        "resample": Image.Resampling(settings.resample).name.lower(),
    }


def _edge(name: str, given: Mapping[str, int]) -> tuple[int, bool]:
    """Return the edge of a square, or of the shorter edge and True."""
    if set(given) == {"shortest_edge"}:
        return given["shortest_edge"], True
    if set(given) == {"height", "width"} and given["height"] == given["width"]:
        return given["height"], False
    raise ValueError(
        f"{name} is {shortened(str(given))}; supported: a square, or shortest_edge with a crop"
    )
