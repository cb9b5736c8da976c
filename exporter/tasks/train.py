"""Trains a task by its name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from exporter.tasks import build_task
from exporter.training.state import read_state
from exporter.training.trainer import TrainingReport, check_numbers, seed_to_resume, train_task


def train(
    task_name: str,
    out: str | Path,
    *,
    resume: bool = False,
    seed: int | None = None,
    steps: int | None = None,
    files: Sequence[str | Path] = (),
    progress: bool = True,
) -> TrainingReport:
    """Train the task of that name into the directory `out`.

    seed: None is 0, or the seed of the run that is resumed. steps: None is the task's own number;
    a resumed run may be given a larger one to go on. files: for the task `text`.
    Ctrl-C stops after the step in flight, saves, and raises KeyboardInterrupt; `resume` goes on.
    Raises ConfigError for a wrong task, file or setting, CheckpointError for `out`.
    """
    check_numbers(seed, steps)
    directory = Path(out)
    if resume:
        seed = seed_to_resume(read_state(directory), seed)
    task = build_task(task_name, seed=seed or 0, files=[Path(file) for file in files])
    return train_task(
        task, directory, resume=resume, seed=seed or 0, steps=steps, progress=progress
    )
