"""Trains a task that is built for a seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from exporter.progress import Progress, no_progress
from exporter.training.state import read_state
from exporter.training.task import Task
from exporter.training.trainer import (
    Say,
    TrainingReport,
    check_numbers,
    no_words,
    seed_to_resume,
    train_task,
)


def train(
    build: Callable[[int], Task],
    out: str | Path,
    *,
    resume: bool = False,
    seed: int | None = None,
    steps: int | None = None,
    progress: Progress = no_progress,
    say: Say = no_words,
) -> TrainingReport:
    """Train the task that `build` returns for a seed into the directory `out`.

    seed: None is 0, or the seed of the run that is resumed. steps: None is the task's own number;
    a resumed run may be given a larger one to go on.
    Ctrl-C stops after the step in flight, saves, and raises KeyboardInterrupt; `resume` goes on.
    Raises ConfigError for a wrong setting, CheckpointError for `out`.
    """
    check_numbers(seed, steps)
    directory = Path(out)
    if resume:
        seed = seed_to_resume(read_state(directory), seed)
    task = build(seed or 0)
    return train_task(
        task, directory, resume=resume, seed=seed or 0, steps=steps, progress=progress, say=say
    )
