"""An imported image model gives what transformers gives, from the picture to the classes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from transformers import DeiTImageProcessorPil, ViTImageProcessorPil

from engine.errors import CheckpointError
from engine.one_pass.image import load_image
from engine.package.manifest import ImageContract
from exporter.checkpoint import load_checkpoint
from exporter.graphs.contracts import image_contract
from exporter.huggingface import import_checkpoint
from tests.exporter.huggingface.encoders import save_vision
from tests.exporter.huggingface.sources import edit_json
from tests.exporter.huggingface.test_options import check_changes

VIT = ViTImageProcessorPil(size={"height": 8, "width": 8})
DEIT = DeiTImageProcessorPil(
    size={"height": 11, "width": 11},
    crop_size={"height": 8, "width": 8},
    image_mean=[0.485, 0.456, 0.406],
    image_std=[0.229, 0.224, 0.225],
)


def imported(source: Path) -> Any:
    import_checkpoint(source, source.with_name("checkpoint"))
    return load_checkpoint(source.with_name("checkpoint")).model


@pytest.mark.parametrize(
    ("class_name", "processor"),
    [
        ("ViTForImageClassification", VIT),
        ("DeiTForImageClassification", DEIT),
        ("DeiTForImageClassificationWithTeacher", DEIT),
    ],
)
@torch.no_grad()
def test_logits_are_those_of_transformers(class_name: str, processor: Any, tmp_path: Path) -> None:
    twin = save_vision(tmp_path / "source", class_name, processor)
    pixels = torch.randn(3, 3, 8, 8)

    notes = import_checkpoint(tmp_path / "source", tmp_path / "checkpoint").notes
    model = load_checkpoint(tmp_path / "checkpoint").model
    logits, _ = model(pixels)

    assert "resized by Pillow" in str(notes) and "gray ones of 16 bits are scaled" in str(notes)
    assert model.config.labels == ("cat", "dog", "owl")
    torch.testing.assert_close(logits, twin(pixels).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("sizes", [([8, 8], [4, 4]), ([8, 8], 4), (8, [4, 4])])
@pytest.mark.parametrize(
    ("class_name", "processor"),
    [("ViTForImageClassification", VIT), ("DeiTForImageClassification", DEIT)],
)
@torch.no_grad()
def test_sizes_may_be_height_and_width(
    class_name: str, processor: Any, sizes: tuple[Any, Any], tmp_path: Path
) -> None:
    edges = dict(zip(("image_size", "patch_size"), sizes, strict=True))
    twin = save_vision(tmp_path / "source", class_name, processor, **edges)
    pixels = torch.randn(1, 3, 8, 8)

    logits, _ = imported(tmp_path / "source")(pixels)

    torch.testing.assert_close(logits, twin(pixels).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"image_size": [8, 16]}, r"image_size is \[8, 16\]; supported: square pictures only"),
        ({"patch_size": [4, 2]}, r"patch_size is \[4, 2\]; supported: square pictures only"),
        ({"image_size": [8]}, r"image_size is \[8\]; supported: square"),
    ],
)
def test_pictures_and_patches_that_are_no_squares_are_refused(
    sizes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_vision(tmp_path / "source", "ViTForImageClassification", VIT)
    edit_json(tmp_path / "source" / "config.json", **sizes)

    with pytest.raises(CheckpointError, match=message):
        imported(tmp_path / "source")


@torch.no_grad()
def test_body_alone_gives_the_vector_of_its_class_token(tmp_path: Path) -> None:
    twin = save_vision(tmp_path / "source", "ViTModel", VIT)
    path = tmp_path / "source" / "model.safetensors"
    token = {"embeddings.mask_token": torch.zeros(1, 1, 16)}  # left by training with hidden patches
    safetensors.torch.save_file({**safetensors.torch.load_file(path), **token}, path)
    pixels = torch.randn(3, 3, 8, 8)

    logits, vectors = imported(tmp_path / "source")(pixels)

    assert logits is None
    expected = twin(pixels).last_hidden_state[:, 0]
    torch.testing.assert_close(vectors, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "processor",
    [
        VIT,
        DEIT,
        ViTImageProcessorPil(size={"height": 8, "width": 8}, resample=0, do_normalize=False),
        ViTImageProcessorPil(
            size={"shortest_edge": 10},
            resample=3,
            do_center_crop=True,
            crop_size={"height": 8, "width": 8},
        ),
        DeiTImageProcessorPil(
            size={"height": 5, "width": 5}, crop_size={"height": 8, "width": 8}, resample=1
        ),
        ViTImageProcessorPil(size={"height": 8, "width": 8}, rescale_factor=1 / 127.5),
        ViTImageProcessorPil(size={"height": 8, "width": 8}, do_rescale=False),
    ],
)
def test_pictures_are_within_a_level_of_those_of_transformers(
    processor: Any, tmp_path: Path
) -> None:
    save_vision(tmp_path / "source", "ViTForImageClassification", processor)
    config = imported(tmp_path / "source").config
    contract = image_contract(config)
    assert contract is not None

    check_pictures(processor, contract)


def check_pictures(processor: Any, contract: ImageContract) -> None:
    """Hold pictures of many sizes against those of a processor of transformers."""
    for width, height in ((8, 8), (31, 19), (7, 40), (5, 3), (64, 64)):
        pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
        picture = Image.fromarray(pixels)
        file = io.BytesIO()
        picture.save(file, "PNG")

        found = load_image(file.getvalue(), contract, path="x")

        expected = processor(picture, return_tensors="np")["pixel_values"][0]
        level = 1 / 255 / np.array(contract.std)[:, None, None]
        assert (np.abs(found - expected) <= level).all()
        assert np.abs(found - expected).mean() < 1e-3 * level.max()


# As ViTImageProcessorFast saves them: what says nothing is null.
_NULLS = ("crop_size", "do_center_crop", "do_convert_rgb", "device", "input_data_format", "do_pad")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("ViTImageProcessor", {"size": 8}),
        ("ViTImageProcessor", {"size": [8, 8], **dict.fromkeys(_NULLS)}),
        ("ViTImageProcessor", {"size": 8, "image_mean": 0.25, "image_std": 0.75}),
        (
            "ViTImageProcessor",
            {"size": 9, "default_to_square": False, "do_center_crop": True, "crop_size": 8},
        ),
        ("DeiTImageProcessor", {"size": 10, "crop_size": 8}),
        ("DeiTImageProcessor", {"size": 8, "do_center_crop": False, "resample": 0}),
        ("DeiTImageProcessor", {"size": 8, "do_center_crop": None, "crop_size": None}),
    ],
)
def test_pictures_are_read_as_transformers_reads_the_settings(
    kind: str, said: dict[str, Any], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    save_vision(source, "ViTForImageClassification", VIT)
    (source / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": kind, **said})
    )

    contract = image_contract(imported(source).config)

    assert contract is not None
    processor = {"V": ViTImageProcessorPil, "D": DeiTImageProcessorPil}[kind[0]]
    check_pictures(processor.from_pretrained(source), contract)


@pytest.mark.parametrize(
    "name",
    [
        "ViTForImageClassification",
        pytest.param("DeiTForImageClassification", marks=pytest.mark.long),
    ],
)
@torch.no_grad()
def test_no_changed_option_of_a_picture_model_changes_the_answers_of_transformers_alone(
    name: str, tmp_path: Path
) -> None:
    source, pixels = tmp_path / "source", torch.randn(3, 3, 8, 8)
    kind = type(save_vision(source, name, VIT))

    check_changes(
        source / "config.json",
        lambda: imported(source)(pixels)[0],
        lambda: kind.from_pretrained(source, dtype="float32").eval()(pixels).logits,
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"size": {"height": 9, "width": 9}}, "makes pictures of 9 pixels, the model has an image"),
        ({"size": {"shortest_edge": 8}}, "of 8 pixels and their own ratio, the model has"),
        ({"size": {"height": 8, "width": 6}}, "size is .*supported: a square, or shortest_edge"),
        ({"resample": 9}, "resample is 9; supported: 0, 1, 2, 3, 4, 5"),
        ({"do_pad": True}, "preprocessor_config.json: do_pad: Input should be False, got True"),
        ({"image_std": [0, 1, 1]}, r"image_std is \(0.0, 1.0, 1.0\); supported: above 0"),
        ({"crop_pct": 0.9}, "crop_pct: Input should be None, got 0.9"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    save_vision(source, "ViTForImageClassification", VIT)
    edit_json(source / "preprocessor_config.json", **change)

    with pytest.raises(CheckpointError, match=reason):
        import_checkpoint(source, tmp_path / "checkpoint")


def test_image_model_without_its_processor_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_vision(source, "ViTForImageClassification", VIT)
    (source / "preprocessor_config.json").unlink()

    with pytest.raises(CheckpointError, match=r"preprocessor_config.json is missing; write it"):
        import_checkpoint(source, tmp_path / "checkpoint")


@pytest.mark.parametrize(("mode", "name"), [("bilinear", "BILINEAR"), ("bicubic", "BICUBIC")])
def test_filters_of_torchvision_are_as_near_as_the_page_says(mode: str, name: str) -> None:
    draw = np.random.default_rng(0)
    for width, height in ((640, 480), (320, 200), (100, 180), (231, 220)):
        across, down = np.arange(width)[None, :, None], np.arange(height)[:, None, None]
        waves = 127 * (1 + np.sin(across / [17, 11, 60] + down / [29, 50, 7]))
        noise = draw.integers(0, 256, (height, width, 3))
        for pixels in (noise.astype(np.uint8), waves.astype(np.uint8)):
            picture, planes = Image.fromarray(pixels), torch.from_numpy(pixels).permute(2, 0, 1)
            ours = np.asarray(picture.resize((224, 224), Image.Resampling[name])).astype(int)
            theirs = torch.nn.functional.interpolate(  # which torchvision calls
                planes[None], (224, 224), mode=mode, antialias=True
            )[0]
            apart = np.abs(ours - theirs.permute(1, 2, 0).numpy())
            assert apart.max() <= 2 and (apart > 0).mean() < 0.02


def test_pillow_makes_most_levels_of_sixteen_bits_white() -> None:
    levels = np.arange(2**16, dtype=np.uint16).reshape(256, 256)

    cut = np.asarray(Image.fromarray(levels).convert("L"))

    assert round((cut == 255).mean(), 3) == 0.996
