"""Runs repeat, stop and go on to the last bit; nothing of anybody's is overwritten."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch

from engine.errors import CheckpointError, ConfigError
from exporter.checkpoint import REPORT_NAME, load_checkpoint
from exporter.tasks import build_task
from exporter.training import trainer
from exporter.training.state import STATE_NAME, read_state
from exporter.training.task import Recipe, Task
from exporter.training.trainer import train

MakeTask = Callable[..., Task]


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path)


def assert_same_run(one: Path, other: Path) -> None:
    """Compare best and last checkpoint, optimizer and random state bit by bit."""
    for name in ("model.safetensors", "last/model.safetensors", STATE_NAME):
        expected, found = tensors(one / name), tensors(other / name)
        assert expected.keys() == found.keys()
        different = [key for key in expected if not torch.equal(expected[key], found[key])]
        assert different == [], name
    states = [read_state(path).model_dump(exclude={"seconds"}) for path in (one, other)]
    assert states[0] == states[1]


def test_a_run_leaves_the_best_and_the_last_checkpoint_and_its_state(
    tmp_path: Path, make_task: MakeTask
) -> None:
    report = train(lambda _: make_task(), tmp_path / "run")

    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "samples.json",
        "last",
        STATE_NAME,
        REPORT_NAME,
    }
    assert load_checkpoint(tmp_path / "run").samples == ("3",)
    assert load_checkpoint(tmp_path / "run").config.task == "copy"
    assert load_checkpoint(tmp_path / "run" / "last").config.task == "copy"
    assert (report.task, report.steps, report.seed) == ("copy", 12, 0)
    assert report.best_step in {4, 8, 12}
    assert 0 <= report.metrics["exact_match"] <= 1
    assert not report.target_reached
    assert "target 99%" in report.summary
    assert report.samples == (("3", "3"),)
    written = json.loads((tmp_path / "run" / REPORT_NAME).read_text())
    assert (written["metrics"], written["summary"]) == (report.metrics, report.summary)
    assert written["machine"].endswith("cores")


def test_a_run_that_goes_on_has_no_report_until_its_end(
    tmp_path: Path, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(lambda _: make_task(), tmp_path / "run", steps=4)
    _let_step(monkeypatch, 6, _press_ctrl_c)

    with pytest.raises(KeyboardInterrupt):
        train(lambda _: make_task(), tmp_path / "run", steps=12, resume=True)

    assert not (tmp_path / "run" / REPORT_NAME).exists()


def test_a_run_that_is_killed_between_validations_loses_minutes_at_most(
    tmp_path: Path, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(lambda _: make_task(), tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "SAVE_SECONDS", 0.0)
        _let_step(patch, 7, _kill)
        with pytest.raises(SystemExit):
            train(lambda _: make_task(), tmp_path / "parts")

    assert read_state(tmp_path / "parts").step == 6  # the last validation was after step 4
    train(lambda _: make_task(), tmp_path / "parts", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_training_lowers_the_loss(tmp_path: Path, make_task: MakeTask) -> None:
    short = train(lambda _: make_task(), tmp_path / "short", steps=1)
    longer = train(lambda _: make_task(), tmp_path / "long", steps=60)

    assert longer.metrics["loss"] < 0.8 * short.metrics["loss"]


def test_a_seed_makes_a_run_repeatable(tmp_path: Path, make_task: MakeTask) -> None:
    for name in ("one", "two"):
        torch.manual_seed(len(name) + ord(name[0]))  # earlier draws do not matter
        train(lambda _: make_task(seed=7), tmp_path / name, seed=7)
    train(lambda _: make_task(seed=8), tmp_path / "other", seed=8)

    assert_same_run(tmp_path / "one", tmp_path / "two")
    one, other = (tensors(tmp_path / name / "last/model.safetensors") for name in ("one", "other"))
    assert not any(torch.equal(one[key], other[key]) for key in one if one[key].ndim > 1)


def test_a_run_leaves_the_callers_random_numbers_and_threads_alone(
    tmp_path: Path, make_task: MakeTask
) -> None:
    torch.set_num_threads(3)
    before = torch.get_rng_state()

    train(lambda _: make_task(), tmp_path / "run", steps=2)

    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("stop", [3, 4, 9])
def test_an_interrupted_run_goes_on_bit_equal(
    tmp_path: Path, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    train(lambda _: make_task(), tmp_path / "whole")
    with monkeypatch.context() as patch:
        _let_step(patch, stop, _press_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            train(lambda _: make_task(), tmp_path / "parts")
    assert read_state(tmp_path / "parts").step == stop

    report = train(lambda _: make_task(), tmp_path / "parts", resume=True)

    assert report.steps == 12
    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_run_that_was_killed_goes_on_bit_equal_from_its_last_validation(
    tmp_path: Path, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(lambda _: make_task(), tmp_path / "whole")
    with monkeypatch.context() as patch:
        _let_step(patch, 7, _kill)
        with pytest.raises(SystemExit):
            train(lambda _: make_task(), tmp_path / "parts")
    assert read_state(tmp_path / "parts").step == 4

    train(lambda _: make_task(), tmp_path / "parts", resume=True)

    assert_same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_finished_run_can_be_given_more_steps(tmp_path: Path, make_task: MakeTask) -> None:
    train(lambda _: make_task(), tmp_path / "whole", steps=16)
    train(lambda _: make_task(), tmp_path / "parts", steps=12)

    train(lambda _: make_task(), tmp_path / "parts", resume=True, steps=16)

    assert_same_run(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize(
    ("steps", "warmup_steps"), [(1, 1), (5, 1), (6, 2), (11, 3), (12, 4), (13, 4), (99, 4)]
)
def test_a_short_run_has_a_short_warm_up(
    steps: int, warmup_steps: int, make_task: MakeTask
) -> None:
    recipe = make_task().recipe

    rates = [recipe.learning_rate(step, steps) for step in range(1, steps + 1)]

    assert rates.index(max(rates)) == warmup_steps - 1


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The learning rates of the steps that are done."""
    seen: list[float] = []

    def rate(recipe: Recipe, step: int, steps: int) -> float:
        seen.append(learning_rate(recipe, step, steps))
        return seen[-1]

    learning_rate = Recipe.learning_rate
    monkeypatch.setattr(Recipe, "learning_rate", rate)
    return seen


def test_a_short_run_learns_at_the_peak(
    tmp_path: Path, make_task: MakeTask, rates: list[float]
) -> None:
    train(lambda _: make_task(warmup_steps=4), tmp_path / "run", steps=3)

    assert rates[0] == max(rates) == 0.01


def test_nothing_of_a_run_is_pickled(tmp_path: Path, make_task: MakeTask) -> None:
    train(lambda _: make_task(), tmp_path / "run", steps=2)

    files = [p for p in (tmp_path / "run").rglob("*") if p.is_file()]

    assert {p.suffix for p in files} == {".json", ".safetensors"}


def test_a_finished_run_is_overwritten_by_a_new_one(tmp_path: Path, make_task: MakeTask) -> None:
    train(lambda _: make_task(seed=1), tmp_path / "run", seed=1)
    train(lambda _: make_task(seed=2), tmp_path / "run", seed=2)
    train(lambda _: make_task(seed=2), tmp_path / "fresh", seed=2)

    assert_same_run(tmp_path / "run", tmp_path / "fresh")


def test_an_unfinished_run_is_not_overwritten(
    tmp_path: Path, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _let_step(patch, 3, _press_ctrl_c)
        with pytest.raises(KeyboardInterrupt):
            train(lambda _: make_task(), tmp_path / "run")

    with pytest.raises(CheckpointError, match=r"unfinished run of copy \(step 3 of 12\).*--resume"):
        train(lambda _: make_task(), tmp_path / "run")


def test_a_run_that_was_killed_as_it_saved_its_first_state_starts_anew(
    tmp_path: Path, make_task: MakeTask
) -> None:
    left = tmp_path / "run" / ".training_state.safetensors.1234.tmp"
    left.parent.mkdir()
    left.write_bytes(b"half")

    train(lambda _: make_task(), tmp_path / "run")

    assert not left.exists()


def test_a_directory_that_holds_something_else_is_left_alone(
    tmp_path: Path, make_task: MakeTask
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")

    with pytest.raises(CheckpointError, match="is not empty and holds no training run"):
        train(lambda _: make_task(), tmp_path)

    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_a_file_in_place_of_the_directory_is_left_alone(
    tmp_path: Path, make_task: MakeTask
) -> None:
    (tmp_path / "run").write_text("mine")

    with pytest.raises(CheckpointError, match="is a file; give a directory"):
        train(lambda _: make_task(), tmp_path / "run")


def test_an_empty_directory_is_used(tmp_path: Path, make_task: MakeTask) -> None:
    train(lambda _: make_task(), tmp_path, steps=1)

    assert load_checkpoint(tmp_path).config.task == "copy"


def test_a_place_that_cannot_be_written_is_refused_before_training(
    tmp_path: Path, make_task: MakeTask
) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(CheckpointError, match=r"cannot write .*: Not a directory"):
        train(lambda _: make_task(), tmp_path / "file" / "run")


def test_no_space_left_is_a_clear_error(
    tmp_path: Path, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(CheckpointError, match="No space left on device; free space there"):
        train(lambda _: make_task(), tmp_path / "run")


def test_there_must_be_a_run_to_resume(tmp_path: Path, make_task: MakeTask) -> None:
    with pytest.raises(CheckpointError, match="there is no run to resume"):
        train(lambda _: make_task(), tmp_path / "run", resume=True)


def test_a_run_is_resumed_with_its_own_seed_data_and_steps(
    tmp_path: Path, make_task: MakeTask
) -> None:
    out = tmp_path / "run"
    train(lambda _: make_task(), out)

    with pytest.raises(ConfigError, match="started with seed 0, it cannot go on with 3"):
        train(lambda _: make_task(), out, seed=3, resume=True)
    with pytest.raises(CheckpointError, match="other data or another configuration"):
        train(lambda _: make_task(warmup_steps=5), out, resume=True)
    with pytest.raises(CheckpointError, match="other data or another configuration"):
        other = replace(make_task(), data_fingerprint="other files")
        train(lambda _: other, out, resume=True)
    with pytest.raises(ConfigError, match=r"steps \(5\) must be at least 12"):
        train(lambda _: make_task(), out, steps=5, resume=True)


def test_a_damaged_state_is_named(tmp_path: Path, make_task: MakeTask) -> None:
    train(lambda _: make_task(), tmp_path / "run", steps=1)
    path = tmp_path / "run" / STATE_NAME
    path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(CheckpointError, match=f"{STATE_NAME} is damaged"):
        train(lambda _: make_task(), tmp_path / "run", resume=True)


def test_ctrl_c_stops_after_the_step_in_flight_and_keeps_the_handler(
    tmp_path: Path, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.getsignal(signal.SIGINT)
    _let_step(monkeypatch, 2, _press_ctrl_c)

    with pytest.raises(KeyboardInterrupt):
        train(lambda _: make_task(), tmp_path / "run")

    assert read_state(tmp_path / "run").step == 2
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_job_in_the_background_ignores_ctrl_c_as_before(
    tmp_path: Path, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        _let_step(monkeypatch, 3, _press_ctrl_c)
        report = train(lambda _: make_task(), tmp_path / "run")
    finally:
        signal.signal(signal.SIGINT, handler)

    assert report.steps == 12


def test_a_loss_that_is_no_number_stops_the_run(tmp_path: Path, make_task: MakeTask) -> None:
    with pytest.raises(ConfigError, match=r"the loss became nan at step \d+"):
        task = make_task(peak_learning_rate=1e30, warmup_steps=1, weight_decay=0.0)
        train(lambda _: task, tmp_path / "run")


def test_steps_must_be_positive(tmp_path: Path, make_task: MakeTask) -> None:
    with pytest.raises(ConfigError, match="steps must be at least 1 and at most 2147483647, got 0"):
        train(lambda _: make_task(), tmp_path / "run", steps=0)


@pytest.mark.parametrize("options", [{"seed": 2**63}, {"seed": -1}, {"steps": 2**31}])
def test_a_number_that_nothing_can_be_seeded_with_is_refused(
    options: dict[str, int], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(options.values())))):
        train(partial(build_task, "dates"), tmp_path / "run", **options)
    assert not (tmp_path / "run").exists()


def test_an_unknown_task_is_refused_with_the_list_of_tasks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'dreams'.*dates, tagging, digits, sentiment, text"):
        train(partial(build_task, "dreams"), tmp_path / "run")


def test_gradients_are_clipped(
    tmp_path: Path, make_task: MakeTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    norms = []
    clip = torch.nn.utils.clip_grad_norm_

    def recorded(parameters: object, max_norm: float) -> torch.Tensor:
        kept = list(parameters)  # type: ignore[call-overload]
        before = clip(kept, max_norm)
        norms.append((float(before), float(clip(kept, float("inf")))))
        return before

    monkeypatch.setattr(trainer.nn.utils, "clip_grad_norm_", recorded)
    monkeypatch.setattr(trainer, "MAX_GRAD_NORM", 0.01)

    train(lambda _: make_task(), tmp_path / "run", steps=3)

    assert all(before > 0.01 for before, _ in norms)
    assert all(after == pytest.approx(0.01, rel=1e-3) for _, after in norms)


def _let_step(patch: pytest.MonkeyPatch, number: int, act: Callable[[], None]) -> None:
    """Let a step of training do something first."""
    learning_rate, acts = Recipe.learning_rate, [act]

    def acting(recipe: Recipe, step: int, steps: int) -> float:
        if step == number and acts:  # it is asked for the rate of every group of parameters
            acts.pop()()
        return learning_rate(recipe, step, steps)

    patch.setattr(Recipe, "learning_rate", acting)


def _press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _kill() -> None:
    raise SystemExit
