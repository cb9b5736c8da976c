"""A folder of pictures for every class: a ViT on a person's own images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError, InvalidRequest
from engine.one_pass.image import load_image
from engine.wording import listed
from exporter.graphs.contracts import image_contract
from exporter.models.config import FeedForwardConfig, PositionConfig, TransformerConfig
from exporter.pictures import SUFFIXES, Picture, class_folders, find_pictures
from exporter.tasks.own.baseline import commonest_label
from exporter.tasks.own.data import OwnData
from exporter.tasks.own.labels import better_than, known_labels
from exporter.tasks.own.parts import Parts
from exporter.training.data import Example
from exporter.training.task import Task


def images_task(seed: int, data: OwnData) -> Task:
    """Return the task of telling in which folder of a directory a picture lies.

    Pictures become numbers as the server makes them. Raises ConfigError for a directory without
    folders, and for files that are not pictures, naming them.
    """
    parts = data.divided(find_images, lambda image: f"{image.label}/{image.path.name}")
    labels = known_labels(*([image.label for image in part] for part in parts))
    config = _start(data, labels)
    # All parts together, so that pictures that cannot be read are one error.
    examples = iter(load_images(config, [image for part in parts for image in part]))
    return data.task(
        "images",
        seed,
        config,
        None,
        Parts(*([next(examples) for _ in part] for part in parts)),
        vary=_moved,
        selection="exact_match",
        judge=better_than(
            commonest_label(
                [image.label for image in parts.training], [image.label for image in parts.held_out]
            ),
            "images",
            "the most frequent class alone",
        ),
        data_summary=f"{parts}; {len(labels)} classes: {listed(labels)}",
    )


def find_images(directory: Path) -> list[Picture]:
    """Return the pictures of a directory that has a folder for every class."""
    found = [picture for picture in find_pictures(directory) if picture.label]
    if not found:
        raise ConfigError(
            f"{directory} has no folders with {', '.join(SUFFIXES)} files; put the pictures of a "
            "class into a folder of its name"
        )
    labels = {picture.label for picture in found}
    if empty := [folder.name for folder in class_folders(directory) if folder.name not in labels]:
        raise ConfigError(
            f"{directory} has folders without {', '.join(SUFFIXES)} files: {listed(empty)}; put "
            "pictures of the class there, or take them out"
        )
    return found


def load_images(config: TransformerConfig, images: Sequence[Picture]) -> list[Example]:
    """Return the pictures as the model sees them; ConfigError names those that cannot be read."""
    numbers = {label: number for number, label in enumerate(config.labels)}
    contract = image_contract(config)
    assert contract is not None, "a model of images has their size"
    examples, problems = [], []
    for image in images:
        try:
            pixels = load_image(image.path.read_bytes(), contract, path=str(image.path))
            examples.append(Example(pixels, np.array([numbers[image.label]])))
        except (InvalidRequest, OSError) as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(f"{len(problems)} pictures cannot be read: {listed(problems, '; ')}")
    return examples


def _start(data: OwnData, labels: tuple[str, ...]) -> TransformerConfig:
    """Return the configuration of the model that learns."""
    start = data.started("vision-encoder")
    if start is not None:
        return start.config.model.model_copy(update={"labels": labels})
    return TransformerConfig(
        architecture="vision-encoder",
        **data.shape.options,
        feed_forward=FeedForwardConfig(activation="gelu"),
        norm_position="first",
        positions=PositionConfig(kind="learned"),
        labels=labels,
        image=data.shape.image,
    )


def _moved(rng: np.random.Generator, example: Example) -> Example:
    """Return a picture moved by up to a sixteenth of its size, its edges repeated."""
    pixels: NDArray[np.float32] = example.source.astype(np.float32, copy=False)
    size = pixels.shape[-1]
    most = size // 16
    down, right = rng.integers(0, 2 * most + 1, size=2)
    padded = np.pad(pixels, ((0, 0), (most, most), (most, most)), mode="edge")
    return Example(padded[:, down : down + size, right : right + size], example.target)
