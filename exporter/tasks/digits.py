"""Handwritten digits of 8x8 pixels: a ViT on the images that come with scikit-learn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits

from exporter.models.config import ImageConfig, TransformerConfig
from exporter.training.data import Example
from exporter.training.task import Recipe, Task, accuracy_judge

MAX_INK = 16  # of scikit-learn's pixels; a served image has 255
IMAGE = ImageConfig(size=8, patch_size=2, channels=1, mean=(0.3,), std=(0.35,))
VALIDATION_SHARE = 10  # one in ten of the images that are not held out

Pixels = NDArray[np.uint8]


def digits_task(seed: int) -> Task:
    """Return the task; `seed` decides order and distortions of the training images."""
    images, labels = load_images()
    parts = split(len(images))

    def chunk(number: int) -> list[Example]:
        rng = np.random.default_rng([seed, number])
        return [_example(_distorted(rng, images[i]), labels[i]) for i in parts["training"]]

    return Task(
        name="digits",
        config=TransformerConfig(
            family="vit",
            d_model=64,
            num_heads=4,
            d_ff=256,
            num_encoder_layers=3,
            activation="gelu",
            norm_position="first",
            dropout=0.1,
            positions="learned",
            labels=tuple("0123456789"),
            image=IMAGE,
        ),
        tokenizer=None,
        recipe=Recipe(
            steps=1200,
            batch_tokens=64,
            peak_learning_rate=2e-3,
            warmup_steps=150,
            label_smoothing=0.1,
            weight_decay=0.05,
            validate_every=200,
        ),
        chunks=chunk,
        validation=[_example(images[i], labels[i]) for i in parts["validation"]],
        held_out=[_example(images[i], labels[i]) for i in parts["held out"]],
        selection="exact_match",
        judge=accuracy_judge("exact_match", "images", 0.96),
    )


def load_images() -> tuple[Pixels, NDArray[np.int64]]:
    """Return the images as a PNG of them would hold them, uint8 [N, 8, 8], and their digits."""
    data = load_digits()
    pixels = np.rint(data.images * (255 / MAX_INK)).astype(np.uint8)
    return pixels, data.target.astype(np.int64)


def split(count: int) -> dict[str, list[int]]:
    """Return the indices of the held-out fifth, of the validation part and of the rest."""
    order = np.random.default_rng(0).permutation(count).tolist()
    held_out, rest = order[: count // 5], order[count // 5 :]
    num_validation = len(rest) // VALIDATION_SHARE
    return {
        "held out": held_out,
        "validation": rest[:num_validation],
        "training": rest[num_validation:],
    }


def pixel_values(pixels: Pixels) -> NDArray[np.float32]:
    """Return what the model sees of an image, [1, 8, 8], as the server computes it."""
    values = (pixels.astype(np.float32) / 255 - IMAGE.mean[0]) / IMAGE.std[0]
    return values.astype(np.float32)[None]


def _example(pixels: Pixels, label: np.int64) -> Example:
    return Example(pixel_values(pixels), np.array([label]))


def _distorted(rng: np.random.Generator, pixels: Pixels) -> Pixels:
    """Return the image moved by a pixel at most, and with more or less ink."""
    if rng.random() < 0.5:
        pixels = _moved(pixels, int(rng.integers(-1, 2)), int(rng.integers(-1, 2)))
    ink = rng.uniform(0.8, 1.2) if rng.random() < 0.5 else 1.0
    inked: Pixels = np.clip(pixels * ink, 0, 255).astype(np.uint8)
    return inked


def _moved(pixels: Pixels, down: int, right: int) -> Pixels:
    moved: Pixels = np.pad(pixels, 1)[1 - down : 9 - down, 1 - right : 9 - right]
    return moved
