"""The list of tasks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import ConfigError
from exporter.tasks import TASKS, build_task


def test_an_unknown_task_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="no task 'date'; the tasks are: dates, tagging, digits"):
        build_task("date")


def test_files_are_for_text_only() -> None:
    with pytest.raises(ConfigError, match="digits makes its own data and takes no files"):
        build_task("digits", files=[Path("x.txt")])


@pytest.mark.parametrize("name", [name for name in TASKS if name != "text"])
def test_a_task_has_its_name_a_target_and_data(name: str) -> None:
    task = build_task(name)

    assert task.name == name
    assert task.config.vocab_size == (task.tokenizer.get_vocab_size() if task.tokenizer else 0)
    assert len(task.validation) > 50 and len(task.held_out) >= len(task.validation)
    assert len(task.chunks(0)) > 1000


def test_the_list_of_tasks_needs_no_torch() -> None:
    code = "import exporter.tasks, sys; assert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True)
