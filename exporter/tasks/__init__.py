"""The tasks that models are trained on, by name. Their modules are imported when they are used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError

if TYPE_CHECKING:
    from exporter.checkpoint import Checkpoint
    from exporter.tasks.own.data import OwnData
    from exporter.training.task import Task

# Those that a demonstration trains; all but `text` are one of the others with data that are made.
TASKS = {
    "dates": "dates as people write them, into ISO 8601 (encoder-decoder)",
    "tagging": "part-of-speech tags for every word (sequence labeller)",
    "digits": "handwritten digits (ViT)",
    "sentiment": "is it praise or blame (BERT classifier)",
    "text": "continue text like the files given (GPT)",
}
# Those that learn from a person's own examples.
OWN_TASKS = {
    "translation": "lines into other lines, from pairs (encoder-decoder)",
    "classification": "a label for every text (BERT classifier)",
    "labelling": "a tag for every word (sequence labeller)",
    "images": "a class for every picture (ViT)",
}


def build_task(
    name: str, seed: int = 0, *, files: Sequence[Path] = (), start: Checkpoint | None = None
) -> Task:
    """Return the task of that name; `seed` decides the order of its training examples.

    `files` are for `text`, and so is what starts to learn from them. Raises ConfigError for an
    unknown name, and for files that are missing, unwanted or unusable.
    """
    if name not in TASKS:
        raise ConfigError(f"there is no task {name!r}; the tasks are: {', '.join(TASKS)}")
    if files and name != "text":
        raise ConfigError(f"{name} makes its own data and takes no files; only text does")
    if name == "text":
        from exporter.tasks.text import text_task

        return text_task(seed, files, start)
    from exporter.tasks.made import made_task

    return made_task(name, seed)


def build_own_task(name: str, data: OwnData, *, seed: int = 0) -> Task:
    """Return the task of that name, one of OWN_TASKS, for a person's data.

    Raises ConfigError for an unknown name, and for data that are missing or wrong.
    """
    match name:
        case "translation":
            from exporter.tasks.own.translation import translation_task

            return translation_task(seed, data)
        case "classification":
            from exporter.tasks.own.classification import classification_task

            return classification_task(seed, data)
        case "labelling":
            from exporter.tasks.own.labelling import labelling_task

            return labelling_task(seed, data)
        case "images":
            from exporter.tasks.own.images import images_task

            return images_task(seed, data)
    raise ConfigError(f"there is no task {name!r}; the tasks are: {', '.join(OWN_TASKS)}")
