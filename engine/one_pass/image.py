"""Decodes an image, under limits, into the array a vision model takes."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from engine.config import RequestLimits
from engine.errors import FieldViolation, InvalidRequest
from engine.package.manifest import ImageContract

_FORMATS = ("PNG", "JPEG")


def load_image(
    data: bytes, contract: ImageContract, *, path: str, limits: RequestLimits | None = None
) -> NDArray[np.float32]:
    """Return the pixel values of an encoded image, float32, shape (channels, size, size).

    The image is turned upright if it says how, reduced to gray or RGB, and brought to the model's
    size if it has another, as the contract says. Raises InvalidRequest, naming `path`.
    """
    limits = limits or RequestLimits()
    if len(data) > limits.max_image_bytes:
        raise _invalid(
            path,
            f"{len(data):,} bytes are more than {limits.max_image_bytes:,}; send a smaller image, "
            "or start the server with a larger max_image_bytes ([limits])",
        )
    image = _decode(data, path, limits)
    if image.mode.startswith("I"):  # 16 bits a pixel; convert() would cut, not scale
        image = Image.fromarray((np.asarray(image, dtype=np.float64) / 257).round().astype("uint8"))
    image = image.convert("L" if contract.channels == 1 else "RGB")
    image = _fit(image, contract, path, limits)
    pixels = np.asarray(image, dtype=np.float32)  # (size, size[, channels])
    pixels = pixels.reshape(contract.size, contract.size, contract.channels)
    mean = np.asarray(contract.mean, dtype=np.float32)
    std = np.asarray(contract.std, dtype=np.float32)
    normalised = (pixels / np.float32(255) - mean) / std
    return np.ascontiguousarray(normalised.transpose(2, 0, 1))  # (channels, size, size)


def _decode(data: bytes, path: str, limits: RequestLimits) -> Image.Image:
    try:
        # Pillow reads the header only; its own limit on pixels is a warning and lies far higher.
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if image.width * image.height > limits.max_image_pixels:
            raise _too_many_pixels(path, f"{image.width} x {image.height} are", limits)
        image.load()
        return ImageOps.exif_transpose(image)
    except InvalidRequest:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_many_pixels(path, "the image has", limits) from error
    except UnidentifiedImageError as error:
        raise _invalid(
            path,
            f"{len(data):,} bytes that start with {data[:8]!r} are not an image in PNG or JPEG; "
            "send one of these",
        ) from error
    except Exception as error:  # damaged data: Pillow's decoders raise a dozen kinds
        raise _invalid(
            path,
            f"the image ({len(data):,} bytes) is damaged and cannot be decoded: {error}; "
            "send a whole PNG or JPEG",
        ) from error


def _fit(
    image: Image.Image, contract: ImageContract, path: str, limits: RequestLimits
) -> Image.Image:
    """Return an image of the model's size: resized, then its middle; black where there is none."""
    width = height = contract.resize or contract.size
    if contract.keep_ratio:
        shorter = min(image.size)
        width, height = (width * length // shorter for length in image.size)
    if width * height > limits.max_image_pixels:
        raise _too_many_pixels(path, f"{width} x {height}, as the model resizes it, are", limits)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling[contract.resample.upper()])
    left, top = (width - contract.size) // 2, (height - contract.size) // 2
    return image.crop((left, top, left + contract.size, top + contract.size))


def _too_many_pixels(path: str, given: str, limits: RequestLimits) -> InvalidRequest:
    return _invalid(
        path,
        f"{given} more than {limits.max_image_pixels:,} pixels; make it smaller before sending it, "
        "or start the server with a larger max_image_pixels ([limits])",
    )


def _invalid(path: str, description: str) -> InvalidRequest:
    return InvalidRequest([FieldViolation(path, description)])
