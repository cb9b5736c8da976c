"""The tasks that models are trained on, by name. Their modules are imported when they are used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import ConfigError

if TYPE_CHECKING:
    from exporter.training.task import Task

TASKS = {
    "dates": "dates as people write them, into ISO 8601 (encoder-decoder)",
    "tagging": "part-of-speech tags for every word (sequence labeller)",
    "digits": "handwritten digits (ViT)",
    "sentiment": "is it praise or blame (BERT classifier)",
    "text": "continue text like the files given (GPT)",
}


def build_task(name: str, *, seed: int = 0, files: Sequence[Path] = ()) -> Task:
    """Return the task of that name; `seed` decides its training examples, `files` are for `text`.

    Raises ConfigError for an unknown name, and for files that are missing, unwanted or unusable.
    """
    if name not in TASKS:
        raise ConfigError(f"there is no task {name!r}; the tasks are: {', '.join(TASKS)}")
    if files and name != "text":
        raise ConfigError(f"{name} makes its own data and takes no files; only text does")
    match name:
        case "dates":
            from exporter.tasks.dates import dates_task

            return dates_task(seed)
        case "tagging":
            from exporter.tasks.tagging import tagging_task

            return tagging_task(seed)
        case "digits":
            from exporter.tasks.digits import digits_task

            return digits_task(seed)
        case "sentiment":
            from exporter.tasks.sentiment import sentiment_task

            return sentiment_task(seed)
        case _:
            from exporter.tasks.text import text_task

            return text_task(seed, files)
