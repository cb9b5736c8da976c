"""Images become the model's pixel values, or a refusal that names the field."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from engine.config import RequestLimits
from engine.errors import InvalidRequest
from engine.one_pass.image import load_image
from engine.package.manifest import ImageContract

GRAY = ImageContract(size=4, channels=1, mean=(0.5,), std=(0.25,), embedding_dim=8)
COLOUR = ImageContract(
    size=4, channels=3, mean=(0.1, 0.2, 0.3), std=(0.5, 0.6, 0.7), embedding_dim=8
)
RANDOM = np.random.default_rng(0)


def _encode(pixels: np.ndarray, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return buffer.getvalue()


def _png_header(width: int, height: int) -> bytes:
    """A PNG that claims a size and holds next to nothing."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0"))


def _refusal(data: bytes, limits: RequestLimits | None = None) -> str:
    with pytest.raises(InvalidRequest) as caught:
        load_image(data, COLOUR, path="items[2].image", limits=limits)
    (violation,) = caught.value.violations
    assert violation.field == "items[2].image"
    return violation.description


def test_gray_image_of_the_right_size_is_normalised_untouched() -> None:
    pixels = RANDOM.integers(0, 256, (4, 4), dtype=np.uint8)

    found = load_image(_encode(pixels), GRAY, path="x")

    assert found.dtype == np.float32 and found.flags.c_contiguous
    np.testing.assert_allclose(found, (pixels[None] / 255 - 0.5) / 0.25, atol=1e-6)


def test_gray_image_of_16_bits_is_scaled_and_not_cut() -> None:
    pixels = np.linspace(0, 65535, 16).astype(np.uint16).reshape(4, 4)

    found = load_image(_encode(pixels), GRAY, path="x")

    np.testing.assert_allclose(found, (pixels[None] / 65535 - 0.5) / 0.25, atol=0.01)


def test_colour_image_keeps_its_channels_apart() -> None:
    pixels = RANDOM.integers(0, 256, (4, 4, 3), dtype=np.uint8)

    found = load_image(_encode(pixels), COLOUR, path="x")

    expected = (pixels / 255 - np.array(COLOUR.mean)) / np.array(COLOUR.std)
    np.testing.assert_allclose(found, expected.transpose(2, 0, 1), rtol=1e-5, atol=1e-6)


def test_other_size_is_resized_with_antialiasing() -> None:
    stripes = np.zeros((64, 64), dtype=np.uint8)
    stripes[:, ::2] = 255

    found = load_image(_encode(stripes), GRAY, path="x")

    assert found.shape == (1, 4, 4)
    np.testing.assert_allclose(found[:, :, 1:3], 0, atol=0.1)  # the mean gray, not one stripe


def test_gray_palette_and_alpha_become_colour_and_back() -> None:
    gray = np.full((4, 4), 100, dtype=np.uint8)
    alpha = np.full((4, 4, 4), 100, dtype=np.uint8)
    palette = io.BytesIO()
    Image.fromarray(gray).convert("P").save(palette, "PNG")

    images = [_encode(gray), _encode(alpha), palette.getvalue(), _encode(gray, "JPEG")]

    for data in images:
        assert load_image(data, COLOUR, path="x").shape == (3, 4, 4)
        np.testing.assert_allclose(load_image(data, GRAY, path="x"), (100 / 255 - 0.5) / 0.25)


def test_sixteen_bits_are_scaled_not_cut() -> None:
    deep = np.full((4, 4), 100 * 257, dtype=np.uint16)

    found = load_image(_encode(deep), GRAY, path="x")

    np.testing.assert_allclose(found, (100 / 255 - 0.5) / 0.25, rtol=1e-6)


def test_image_that_lies_on_its_side_is_turned_upright() -> None:
    pixels = np.zeros((8, 8), dtype=np.uint8)
    pixels[:, :4] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned a quarter clockwise

    found = load_image(_encode(pixels, "PNG", exif=exif), GRAY, path="x")

    assert (found[0, 0] > found[0, 3]).all()


@pytest.mark.parametrize("data", [b"", b"GIF89a\x01\x00\x01\x00", b"<svg/>", b"\x89PNG\r\n\x1a\n"])
def test_what_is_no_png_or_jpeg_is_refused(data: bytes) -> None:
    description = _refusal(data)

    assert f"{len(data)} bytes" in description and "PNG or JPEG" in description


def test_other_formats_are_refused_even_if_pillow_knows_them() -> None:
    assert "not an image in PNG or JPEG" in _refusal(_encode(np.zeros((4, 4), np.uint8), "BMP"))


def test_image_cut_short_is_refused() -> None:
    data = _encode(RANDOM.integers(0, 256, (40, 40, 3), dtype=np.uint8), "JPEG")

    assert "damaged" in _refusal(data[: len(data) // 2])


def test_too_many_bytes_are_refused_with_both_numbers() -> None:
    description = _refusal(b"x" * 1001, RequestLimits(max_image_bytes=1000))

    assert "1,001" in description and "1,000" in description


@pytest.mark.parametrize("side", [5_000, 12_000, 60_000])
def test_small_file_with_a_huge_image_is_refused_before_it_is_decoded(side: int) -> None:
    description = _refusal(_png_header(side, side))

    assert "more than 16,777,216 pixels" in description


@given(data=st.data())
@settings(max_examples=150)
def test_damaged_images_give_pixels_or_a_refusal_and_nothing_else(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["PNG", "JPEG"]))
    content = bytearray(_encode(np.arange(300, dtype=np.uint8).reshape(10, 10, 3), kind))
    for place in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[place] = data.draw(st.integers(0, 255))

    try:
        found = load_image(bytes(content), COLOUR, path="x")
    except InvalidRequest:
        return
    assert found.shape == (3, 4, 4) and np.isfinite(found).all()


def test_shorter_edge_is_resized_and_the_middle_seen() -> None:
    pixels = RANDOM.integers(0, 256, (12, 30), dtype=np.uint8)
    contract = GRAY.model_copy(update={"resize": 6, "keep_ratio": True, "resample": "bicubic"})

    found = load_image(_encode(pixels), contract, path="x")

    resized = np.asarray(Image.fromarray(pixels).resize((15, 6), Image.Resampling.BICUBIC))
    middle = resized[1:5, 5:9].astype(np.float32)
    np.testing.assert_allclose(found[0], (middle / 255 - 0.5) / 0.25, atol=1e-6)


def test_picture_is_stretched_to_another_size_than_the_model_sees() -> None:
    pixels = RANDOM.integers(0, 256, (4, 4), dtype=np.uint8)  # the model's size, but not `resize`
    contract = GRAY.model_copy(update={"resize": 9, "resample": "nearest"})

    found = load_image(_encode(pixels), contract, path="x")

    resized = np.asarray(Image.fromarray(pixels).resize((9, 9), Image.Resampling.NEAREST))
    middle = resized[2:6, 2:6].astype(np.float32)
    np.testing.assert_allclose(found[0], (middle / 255 - 0.5) / 0.25, atol=1e-6)


def test_narrow_picture_is_refused_before_it_is_made_huge() -> None:
    data = _encode(np.zeros((2, 4000), np.uint8))
    contract = GRAY.model_copy(update={"resize": 256, "keep_ratio": True})

    with pytest.raises(InvalidRequest, match="512000 x 256, as the model resizes it, are more"):
        load_image(data, contract, path="x")
