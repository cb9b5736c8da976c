"""The digits: what is trained on is what a served image becomes."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from exporter.tasks.digits import IMAGE, digits_task, load_images, pixel_values, split


def test_a_png_of_a_digit_gives_the_values_that_the_model_was_trained_on() -> None:
    images, _ = load_images()
    file = io.BytesIO()
    Image.fromarray(images[3]).save(file, "PNG")

    opened = Image.open(file).convert("L").resize((8, 8))
    values = (np.asarray(opened, np.float32) / 255 - IMAGE.mean[0]) / IMAGE.std[0]

    assert np.array_equal(values[None].astype(np.float32), pixel_values(images[3]))
    assert images.max() == 255 and images.min() == 0


def test_a_fifth_is_held_out_and_in_no_other_part() -> None:
    parts = split(1797)

    assert len(parts["held out"]) == 359
    assert sorted(i for part in parts.values() for i in part) == list(range(1797))


def test_distortion_changes_training_images_only_and_repeats_with_the_seed() -> None:
    task, again, other = digits_task(0), digits_task(0), digits_task(1)

    def first(examples: object) -> np.ndarray:
        return np.stack([e.source for e in list(examples)[:50]])  # type: ignore[call-overload]

    assert np.array_equal(first(task.chunks(1)), first(again.chunks(1)))
    assert not np.array_equal(first(task.chunks(1)), first(task.chunks(2)))
    assert not np.array_equal(first(task.chunks(1)), first(other.chunks(1)))
    assert np.array_equal(first(task.held_out), first(other.held_out))
