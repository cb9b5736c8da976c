"""Pixels as images that our server reads: PNG, which keeps every value."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from operator import eq

from server.adapters.kserve.errors import Refused
from server.adapters.kserve.tensors import Tensor

_COLOURS = {1: 0, 3: 2}  # PNG's numbers for gray and RGB, by their number of channels
_FASTEST = 1


def encoded_images(tensor: Tensor) -> list[bytes]:
    """Return the images of a tensor, as they are or as PNG.

    BYTES holds encoded images; UINT8 and FP32 hold pixels from 0 to 255, of shape (height, width,
    channels) or (images, height, width, channels). Raises Refused for other shapes and values.
    """
    if tensor.datatype == "BYTES":
        return list(tensor.values)
    *count, height, width, channels = tensor.shape if len(tensor.shape) > 2 else (0, 0, 0, 0, 0)
    if len(count) > 1 or channels not in _COLOURS or not height * width:
        raise Refused(
            f"{tensor.name}: shape {list(tensor.shape)} is no image; give (height, width, channels)"
            " or (images, height, width, channels) with 1 or 3 channels"
        )
    pixels, size = _pixels(tensor), height * width * channels
    return [
        _png(pixels[start : start + size], height, width, channels)
        for start in range(0, len(pixels), size)
    ]


def _pixels(tensor: Tensor) -> bytes:
    if isinstance(tensor.values, bytes):
        return tensor.values
    found = _whole(tensor.values) if tensor.datatype == "FP32" else None
    if found is None:
        raise Refused(
            f"{tensor.name}: pixels are whole numbers from 0 to 255, as UINT8 or FP32; the server "
            "scales and normalizes them itself"
        )
    return found


def _whole(values: Sequence[float]) -> bytes | None:
    try:
        found = bytes(map(int, values))
    except (ValueError, OverflowError):  # too large or small, or no number
        return None
    return found if all(map(eq, found, values)) else None


def _png(pixels: bytes, height: int, width: int, channels: int) -> bytes:
    row = width * channels
    rows = (b"\0" + pixels[start : start + row] for start in range(0, len(pixels), row))
    header = struct.pack(">2I5B", width, height, 8, _COLOURS[channels], 0, 0, 0)
    data = zlib.compress(b"".join(rows), _FASTEST)
    chunks = ((b"IHDR", header), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
