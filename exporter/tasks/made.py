"""Tasks that make their own data: files of examples for another task, and what is to learn them."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from exporter.files import scratch_directory
from exporter.models.config import ImageConfig
from exporter.tasks import build_own_task
from exporter.tasks.date_lines import draw_date, write_date
from exporter.tasks.opinions import NEGATIVE, POSITIVE, write_opinion
from exporter.tasks.own.data import OwnData
from exporter.tasks.own.size import SIZES, Size
from exporter.tasks.tagged_sentences import write_sentence
from exporter.training.task import Task, accuracy_judge

Part = Literal["learned", "judged"]

_SMALL = replace(SIZES["tiny"], d_model=64, d_ff=256, vocab_size=2000)
_IMAGE = ImageConfig(size=16, patch_size=4, channels=1, mean=(0.3,), std=(0.35,))
NUM_LEARNED = 100_000  # examples that are drawn to learn from
NUM_JUDGED = 2000  # likewise to judge by: half of them choose the best checkpoint


@dataclass(frozen=True)
class Made:
    """Data of another task, the model that learns from them, and how good it is to be."""

    task: str  # one of OWN_TASKS
    write: Callable[[Path, Part], None]  # a part of the examples, which gets its name
    size: Size
    metric: Literal["exact_match", "label_accuracy"]
    what: str  # that is counted
    target: float  # the share that is to be right


def made_task(name: str, seed: int) -> Task:
    """Return the task of that name; `seed` decides in which order a model learns."""
    made = MADE[name]
    with scratch_directory(name) as directory:
        made.write(directory, "learned")
        made.write(directory, "judged")
        data = OwnData(directory / "learned", directory / "judged", made.size)
        task = build_own_task(made.task, data, seed=seed)
    # Texts that are to be exact are judged by their tokens.
    validation, held_out = (
        [replace(example, text=None) for example in part]
        for part in (task.validation, task.held_out)
    )
    return replace(
        task,
        name=name,
        validation=validation,
        held_out=held_out,
        selection=made.metric,
        judge=accuracy_judge(made.metric, made.what, made.target),
    )


def drawn(draw: Callable[[random.Random], tuple[str, str]]) -> Callable[[Path, Part], None]:
    """Return what writes a file of examples.

    `draw` returns an example and what it is about; a tenth of that, by a hash, is never learned.
    """

    def write(directory: Path, part: Part) -> None:
        rng, texts = random.Random(part), list[str]()
        while len(texts) < (NUM_JUDGED if part == "judged" else NUM_LEARNED):
            text, about = draw(rng)
            if ((zlib.crc32(about.encode()) >> 8) % 10 == 0) == (part == "judged"):
                texts.append(text)
        (directory / part).write_text("\n".join(texts), encoding="utf-8")

    return write


def draw_line(rng: random.Random) -> tuple[str, str]:
    """Return a line and its date in ISO 8601, and that date."""
    date = draw_date(rng)
    return f"{write_date(rng, date)}\t{date.isoformat()}", date.isoformat()


def draw_opinion(rng: random.Random) -> tuple[str, str]:
    """Return a text and its label, and the text in small letters."""
    label = rng.choice((NEGATIVE, POSITIVE))
    text = write_opinion(rng, label)
    return f"{text}\t{label}", text.lower()


def draw_sentence(rng: random.Random) -> tuple[str, str]:
    """Return words and their tags, a line each, and the words.

    Names, and what begins a sentence, have a capital half of the time.
    """
    sentence = write_sentence(rng)
    lines = [
        f"{word.capitalize() if can_be_large and rng.random() < 0.5 else word} {tag}\n"
        for i, (word, tag) in enumerate(sentence)
        for can_be_large in [i == 0 or tag == "PROPN" or word == "i"]
    ]
    return "".join(lines), " ".join(word for word, _ in sentence)


def write_digits(directory: Path, part: Part) -> None:
    """Write the images that come with scikit-learn, a folder a digit; three in ten to judge by."""
    from sklearn.datasets import load_digits

    data = load_digits()
    chosen = np.random.default_rng(0).permutation(len(data.images)) % 10 < 3
    for i in np.flatnonzero(chosen == (part == "judged")):
        path = directory / part / str(data.target[i]) / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.rint(data.images[i] * (255 / 16)).astype(np.uint8)).save(path)


MADE = {
    "dates": Made(
        "translation",
        drawn(draw_line),
        replace(
            SIZES["tiny"],
            num_decoder_layers=2,
            vocab_size=2000,
            steps=2400,
            writing_rate=2.5e-3,
            max_len=32,
            dropout=0.0,
        ),
        "exact_match",
        "dates",
        0.99,
    ),
    "tagging": Made(
        "labelling",
        drawn(draw_sentence),
        replace(_SMALL, steps=1200, peak_learning_rate=5e-3, max_len=64, dropout=0.0),
        "label_accuracy",
        "tokens",
        0.99,
    ),
    "digits": Made(
        "images",
        write_digits,
        replace(_SMALL, steps=1200, peak_learning_rate=2e-3, image=_IMAGE),
        "exact_match",
        "images",
        0.96,
    ),
    "sentiment": Made(
        "classification",
        drawn(draw_opinion),
        replace(_SMALL, steps=1000, batch_tokens=2048, peak_learning_rate=1e-3, max_len=128),
        "exact_match",
        "texts",
        0.98,
    ),
}
