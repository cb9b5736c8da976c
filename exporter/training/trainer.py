"""Trains a model on a task.

A run's directory OUT is itself the checkpoint that did best on the validation examples:

    OUT/config.json, model.safetensors, tokenizer.json    the best checkpoint
    OUT/last/                                             the checkpoint of the last validation
    OUT/training_state.safetensors                        what `resume` needs
    OUT/report.json                                       how the run went, once it is finished

Checkpoints hold the moving average of the weights if the recipe asks for one, the state both.
Runs of one seed are bit-equal on one machine, and so is a run that was interrupted and resumed.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from engine.errors import CheckpointError, ConfigError
from engine.machine import machine_name
from engine.text.chat_format import CHAT_NAME
from exporter.checkpoint import (
    CONFIG_NAME,
    REPORT_NAME,
    SAMPLES_NAME,
    TARGET_TOKENIZER_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
    load_checkpoint,
    save_checkpoint,
)
from exporter.files import remove_unfinished, replace_file, writing_to
from exporter.models import build_model
from exporter.progress import Progress, no_progress
from exporter.training.data import BatchStream, Example, Position
from exporter.training.evaluation import Evaluation, evaluate
from exporter.training.losses import batch_logits, cross_entropy
from exporter.training.pace import Pace
from exporter.training.state import STATE_NAME, RunState, read_state, restore_state, save_state
from exporter.training.task import Recipe, Task

LAST_NAME = "last"
_OF_A_RUN = (  # beside that
    WEIGHTS_NAME,
    CONFIG_NAME,
    TOKENIZER_NAME,
    TARGET_TOKENIZER_NAME,
    CHAT_NAME,
    SAMPLES_NAME,
    STATE_NAME,
    REPORT_NAME,
)
SAVE_SECONDS = 600.0  # the state is saved at every validation, and as often as this
NUM_THREADS = 2  # the models are small; and sums depend on it, so it is part of "repeatable"
MAX_STEPS, MAX_SEED = 2**31 - 1, 2**63 - 1  # torch takes no larger seed
ADAM_BETAS, ADAM_EPS = (0.9, 0.98), 1e-9  # section 5.3 of the paper
MAX_GRAD_NORM = 1.0  # larger gradients are scaled down to it

Say = Callable[[str], None]  # shows a line that stays
_Weights = tuple[Tensor, ...] | list[Tensor]


def no_words(line: str) -> None:
    """Discard a line."""


@dataclass(frozen=True)
class TrainingReport:
    """The outcome of a run."""

    task: str
    out: Path
    steps: int
    best_step: int  # the checkpoint in `out`
    seed: int
    seconds: float  # training, without the time between an interruption and its resumption
    num_parameters: int
    metrics: dict[str, float]  # best checkpoint, on held-out examples
    summary: str  # one line that has the metric and its target
    target_reached: bool
    samples: tuple[tuple[str, str], ...]  # inputs and outputs to try the model on


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
    a resumed run may be given a larger one to go on. A run of fewer steps than the task's has a
    shorter warm-up, too. `say` gets a line for every validation.
    Ctrl-C stops after the step in flight, saves, and raises KeyboardInterrupt; `resume` goes on.
    Raises ConfigError for a wrong setting, CheckpointError for `out`.
    """
    if steps is not None and not 1 <= steps <= MAX_STEPS:
        raise ConfigError(f"steps must be at least 1 and at most {MAX_STEPS}, got {steps}")
    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise ConfigError(f"seed must be from 0 to {MAX_SEED}, got {seed}")
    directory = Path(out)
    before = read_state(directory) if resume else None
    if before is not None and seed not in (None, before.seed):
        raise ConfigError(
            f"the run was started with seed {before.seed}, it cannot go on with {seed}"
        )
    seed = before.seed if before else seed or 0
    task = build(seed)
    if before is None:
        state = _fresh(directory, task, seed, steps)
    else:
        state = _resumed(before, directory, task, steps)
    with _reproducible(seed):
        run = Run(task, directory, state, restore=resume)
        with _deferred_interrupt() as interrupt:
            run.train(progress, say, interrupt)
        return run.report()


class Run:
    """A training run in progress: the model, the optimizer and the state that goes with them."""

    def __init__(self, task: Task, out: Path, state: RunState, *, restore: bool) -> None:
        self._task = task
        self._out = out
        self._state = state
        self._saved = time.monotonic()
        recipe = task.recipe
        self._model = _start(task)
        matrices = [p for p in self._model.parameters() if p.ndim >= 2]  # which alone decay
        others = [p for p in self._model.parameters() if p.ndim < 2]  # biases and norms
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": recipe.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=recipe.peak_learning_rate,
            betas=ADAM_BETAS,
            eps=ADAM_EPS,
            fused=True,
        )
        self._average = averaged(self._model, recipe.average_decay)
        if restore:
            restore_state(out, self._model, self._average, self._optimizer)
        else:
            self._save()  # a directory that cannot be written to is found out now
        self._batches = BatchStream(
            task.chunks,
            task.config,
            batch_tokens=recipe.batch_tokens,
            seed=state.seed,
            position=Position(state.chunk, state.batch),
        )

    def train(self, progress: Progress, say: Say, interrupt: threading.Event) -> None:
        """Do the steps that are left; the state is saved whatever ends them."""
        (self._out / REPORT_NAME).unlink(missing_ok=True)
        started, before = time.monotonic(), self._state.seconds
        pace = Pace()
        self._model.train()
        while self._state.step < self._state.steps:
            loss, num_tokens = self._update()
            position = self._batches.position
            self._state = self._state.model_copy(
                update={
                    "step": self._state.step + 1,
                    "chunk": position.chunk,
                    "batch": position.batch,
                    "seconds": before + time.monotonic() - started,
                }
            )
            step, every = self._state.step, self._task.recipe.validate_every
            pace.add(loss, num_tokens)
            left = pace.seconds_for(self._state.steps - step)
            progress(step, self._state.steps, str(pace), left)
            if step % every == 0 or step == self._state.steps:
                self._validate(say)
                self._state = self._state.model_copy(
                    update={"seconds": before + time.monotonic() - started}
                )
                self._save()
            elif time.monotonic() - self._saved >= SAVE_SECONDS:
                self._save()
            if interrupt.is_set() and self._state.step < self._state.steps:
                self._save()
                say(f"Stopped after step {self._state.step}; --resume goes on from there.")
                raise KeyboardInterrupt
        self._state = self._state.model_copy(update={"finished": True})
        self._save()

    def report(self) -> TrainingReport:
        """Judge the best checkpoint by the held-out examples."""
        best = load_checkpoint(self._out).model
        task = self._task
        outcome = task.judge(self._evaluate(best, task.held_out))
        report = TrainingReport(
            task=self._task.name,
            out=self._out,
            steps=self._state.step,
            best_step=self._state.best_step,
            seed=self._state.seed,
            seconds=self._state.seconds,
            num_parameters=sum(p.numel() for p in self._model.parameters()),
            metrics=outcome.metrics,
            summary=outcome.summary,
            target_reached=outcome.reached,
            samples=self._task.samples,
        )
        shown = {**asdict(report), "machine": machine_name()}
        for name in ("out", "samples"):
            del shown[name]
        with writing_to(self._out):
            content = json.dumps(shown, indent=2, ensure_ascii=False) + "\n"
            replace_file(self._out / REPORT_NAME, content.encode())
        return report

    def _update(self) -> tuple[float, int]:
        """Do one step of gradient descent; return its loss and number of tokens."""
        recipe, step = self._task.recipe, self._state.step + 1
        for group in self._optimizer.param_groups:
            group["lr"] = recipe.learning_rate(step, self._state.steps)
        batch = self._batches.next()
        logits = batch_logits(self._model, batch)
        loss = cross_entropy(logits, batch.labels, recipe.label_smoothing)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._model.parameters(), MAX_GRAD_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._average.update_parameters(self._model)
        value = loss.item()
        if not math.isfinite(value):
            raise ConfigError(
                f"the loss became {value} at step {step}; the state before is in {self._out}, "
                f"the peak learning rate ({recipe.peak_learning_rate}) is too high"
            )
        return value, batch.num_tokens

    def _validate(self, say: Say) -> None:
        """Save the checkpoint as the last, and as the best if it is better than all before."""
        task, step = self._task, self._state.step
        result = self._evaluate(self._average.module, task.validation)
        # The best checkpoint has most of it; the loss decides between equals.
        score = (-result.loss, 0.0)
        if task.selection != "loss":
            score = getattr(result, task.selection), -result.loss
        is_best = self._state.best is None or score > self._state.best
        self._save_checkpoint(self._out / LAST_NAME)
        if is_best:
            self._save_checkpoint(self._out)
            self._state = self._state.model_copy(update={"best": score, "best_step": step})
        say(
            f"Validation after step {step}: loss {result.loss:.4f}, "
            f"labels right {result.label_accuracy:.2%}, examples right {result.exact_match:.2%}"
            + (f", chrF {result.chrf:.1f}" if task.selection == "chrf" else "")
            + (" (best so far)" if is_best else "")
        )

    def _evaluate(self, model: nn.Module, examples: Sequence[Example]) -> Evaluation:
        task = self._task
        return evaluate(model, task.config, examples, task.target_tokenizer, task.generation)

    def _save_checkpoint(self, out: Path) -> None:
        task, samples = self._task, [text for text, _ in self._task.samples]
        model, tokenizer = self._average.module, task.tokenizer
        save_checkpoint(out, task.name, model, tokenizer, samples, task.generation, task.text)

    def _save(self) -> None:
        self._saved = time.monotonic()
        save_state(self._out, self._state, self._model, self._average, self._optimizer)


def averaged(model: nn.Module, decay: float) -> AveragedModel:
    """Return a copy of a model whose weights are a moving average; 0: those of the model itself.

    "Attention Is All You Need" averages its last checkpoints (section 6.1) to the same end: the
    learning rate never falls to 0, so each step is a little off, each in another direction.
    """

    def update(average: _Weights, current: _Weights, count: Tensor | int) -> None:
        steps = int(count)
        now = min(decay, steps / (steps + 10))  # the first weights are soon forgotten
        get_ema_multi_avg_fn(now)(average, current, count)  # type: ignore[no-untyped-call]

    return AveragedModel(model, multi_avg_fn=update)


def _start(task: Task) -> nn.Module:
    """Return the model of a task with the weights that it starts from."""
    model = build_model(task.config)
    state = model.state_dict()
    with torch.no_grad():
        for name, weight in task.initial_weights.items():
            if name in state and state[name].shape == weight.shape:  # not the head of other labels
                state[name].copy_(weight)
    return model


def _fresh(out: Path, task: Task, seed: int, steps: int | None) -> RunState:
    """Make room for a new run; only a finished run of ours is ever overwritten."""
    with writing_to(out):
        if out.exists() and not out.is_dir():
            raise CheckpointError(f"{out} is a file; give a directory, or a name that is free")
        if out.is_dir():
            remove_unfinished(out, _OF_A_RUN)
        if out.is_dir() and any(out.iterdir()):
            _check_overwritable(out)
            for name in _OF_A_RUN:
                (out / name).unlink(missing_ok=True)
            shutil.rmtree(out / LAST_NAME, ignore_errors=True)
        out.mkdir(parents=True, exist_ok=True)
    return RunState(
        task=task.name,
        seed=seed,
        fingerprint=_fingerprint(task),
        steps=steps or task.recipe.steps,
    )


def _check_overwritable(out: Path) -> None:
    if not (out / STATE_NAME).is_file():
        raise CheckpointError(
            f"{out} is not empty and holds no training run, so nothing in it is overwritten; "
            "give an empty or new directory"
        )
    state = read_state(out)
    if not state.finished:
        raise CheckpointError(
            f"{out} holds an unfinished run of {state.task} (step {state.step} of {state.steps}); "
            "go on with --resume, or remove it to start anew"
        )


def _resumed(state: RunState, out: Path, task: Task, steps: int | None) -> RunState:
    if state.task != task.name:
        raise CheckpointError(f"{out} holds a run of {state.task}, not of {task.name}")
    if state.fingerprint != _fingerprint(task):
        raise CheckpointError(
            f"{out} holds a run of {state.task} with other data or another configuration; resume "
            "it with the files and the release of tokenweir that it was started with"
        )
    steps = steps or state.steps
    if steps < state.step:
        raise ConfigError(f"steps ({steps}) must be at least {state.step}, which are done already")
    return state.model_copy(update={"steps": steps, "finished": state.finished})


def _fingerprint(task: Task) -> str:
    """Return a digest of all that must not change between two sittings of a run."""
    recipe: Recipe = replace(task.recipe, steps=1)  # a run may be continued
    tokenizer = task.tokenizer.to_str() if task.tokenizer else ""
    parts = (task.config.model_dump_json(), str(asdict(recipe)), tokenizer, task.data_fingerprint)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """Seed torch and fix its number of threads; both are put back afterwards."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(NUM_THREADS)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


@contextmanager
def _deferred_interrupt() -> Iterator[threading.Event]:
    """Turn the first Ctrl-C into an event, so that no step is cut in two; a second one cuts."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted  # signals do not arrive here
        return
    previous = signal.getsignal(signal.SIGINT)
    if previous is signal.SIG_IGN:
        yield interrupted  # a job in the background, for which Ctrl-C is not meant
        return

    def remember(_signal: int, _frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, remember)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, previous)
