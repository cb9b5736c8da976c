"""A model that computes nothing: its answers are there at once, or after a time for each row."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers

from engine.config import EngineConfig
from engine.cuda.lazy_rows import LazyRows, Row
from engine.generation.async_engine import AsyncEngine
from engine.generation.core import EngineCore
from engine.package.manifest import CacheShape, Certificate, GenerationContract, Manifest
from engine.package.package import Package
from engine.sampling.logits import StepLogits
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import StepResult
from engine.slots.batch import RowLengths, RowOp, ScheduledBatch
from engine.slots.cache import SlotKVCache
from engine.slots.step_block import Pending
from engine.slots.step_runner import SlotStepRunner
from engine.text.constraint import ConstraintCompiler
from engine.text.tokenizer import SourceAndTarget, Tokenizer

NAME = "stand-in"
_NUM_WORDS = 1000  # behind the 256 bytes; what it says are words
_EOS = 256 + _NUM_WORDS  # never said
_VOCAB_SIZE = _EOS + 1
_TOKENIZER = "tokenizer.json"
_MOST_COLUMNS = 256  # for the likeliest tokens


class StandInModel:
    """A ModelRunner that says words in a fixed order, whatever was asked.

    It takes its time as a device does: a step begins when it is given and the one before has ended,
    and whoever wants what it brings waits for its end without holding the interpreter.
    """

    def __init__(self, num_slots: int, seconds_a_row: float = 0.0) -> None:
        self.num_padding = 0
        self.is_on_device = self.has_sampling_graphs = False  # the host chooses
        self._num_slots = num_slots
        self._seconds_a_row = seconds_a_row
        # Distances of the likeliest from each other do not matter, as long as all may be drawn.
        self._logits = np.linspace(9, 8, _MOST_COLUMNS, dtype=np.float32)
        self._logprobs = self._logits - np.float32(9 + np.log(_VOCAB_SIZE))
        self.reset()

    def reset(self) -> None:
        """Forget all sequences, see ModelRunner."""
        self._ends: deque[float] = deque()  # ends of the steps that nobody has waited for
        self._last_end = 0.0
        self._lengths = np.zeros(self._num_slots, np.int64)

    @property
    def row_lengths(self) -> RowLengths:
        """How many tokens each row holds."""
        return RowLengths(tuple(self._lengths.tolist()), (0,) * self._num_slots)

    def start(self, batch: ScheduledBatch, *of_a_device: object) -> Pending:
        """Begin one step, see ModelRunner."""
        for op in batch.row_ops:
            self._change(op)
        last_ids = list(batch.decode_ids)
        self._lengths[: len(last_ids)] += 1
        for chunk in batch.chunks:
            self._lengths[chunk.row] += len(chunk.token_ids)
            last_ids += chunk.token_ids[len(chunk.token_ids) - chunk.num_logits :]
        if self._seconds_a_row:
            began = max(time.perf_counter(), self._last_end)
            self._last_end = began + self._seconds_a_row * len(last_ids)
            self._ends.append(self._last_end)
        found = self._behind(np.array(last_ids, np.int64), batch.num_top)
        return lambda: found

    def wait(self) -> None:
        """Wait for the end of the earliest step that was not waited for."""
        if self._ends:
            time.sleep(max(0.0, self._ends.popleft() - time.perf_counter()))

    def _behind(self, last_ids: NDArray[np.int64], num_top: int) -> StepLogits:
        N, k = len(last_ids), min(num_top, _MOST_COLUMNS)
        top_ids = 256 + (last_ids[:, None] + np.arange(1, k + 1)) % _NUM_WORDS  # (N, k)
        return StepLogits(
            LazyRows(N, _VOCAB_SIZE, _refuse_rows),
            top_ids,
            np.broadcast_to(self._logits[:k], (N, k)),
            np.broadcast_to(self._logprobs[:k], (N, k)),
        )

    def _change(self, op: RowOp) -> None:
        lengths, origin, target = self._lengths, op.origin, op.target
        if op.kind == "swap":
            lengths[[origin, target]] = lengths[[target, origin]]
        elif op.kind in ("cut", "clear"):
            lengths[target] = min(lengths[target], op.start)
        else:
            lengths[target] = min(lengths[origin], op.stop or lengths[origin])
            if op.kind == "move":
                lengths[origin] = 0


class StandInRunner(SlotStepRunner):
    """Lets a stand-in choose its tokens by itself, and compute the next step with them."""

    def __init__(self, model: StandInModel) -> None:
        super().__init__(model, Sampler(), overlaps=True)
        self._stand_in = model

    def collect(self) -> StepResult:
        """Return what the earliest step has brought once its time is over, see StepRunner."""
        self._stand_in.wait()
        return super().collect()


def _refuse_rows(rows: Sequence[int]) -> list[Row]:
    raise ValueError(
        f"a stand-in has no logits of row {rows[0]}, only the {_MOST_COLUMNS} likeliest tokens; "
        "ask it without controls, constraints, or sampling from all tokens"
    )


def stand_in_engine(num_slots: int, seconds_a_row: float, directory: Path) -> AsyncEngine:
    """Return an engine on a stand-in; its files are in a directory."""
    contract = _contract()
    config = EngineConfig(
        max_num_seqs=num_slots,
        max_num_batched_tokens=max(1024, 2 * num_slots),
        max_queue_size=2 * num_slots,
        reuse_prefixes=False,  # every request has the same prompt
    )
    _write_tokenizer(directory)
    tokenizer = Tokenizer(directory / _TOKENIZER)
    package = Package(path=directory, manifest=_manifest(contract), manifest_sha256=bytes(32))
    scheduler = Scheduler(config, contract, SlotKVCache(config, contract))
    core = EngineCore(scheduler, StandInRunner(StandInModel(num_slots, seconds_a_row)))
    constraints = ConstraintCompiler(tokenizer, _VOCAB_SIZE, contract.eos_token_ids)
    tokenizers = SourceAndTarget(tokenizer, tokenizer)
    return AsyncEngine(package, core, tokenizers, config, constraints=constraints)


def _contract() -> GenerationContract:
    return GenerationContract(
        vocab_size=_VOCAB_SIZE,
        num_heads=1,
        cache=CacheShape(num_layers=1, num_kv_heads=1, max_len=4096, head_dim=1),
        cross_cache=None,
        decoder_start_token_id=None,
        eos_token_ids=(_EOS,),
    )


def _manifest(contract: GenerationContract) -> Manifest:
    shown = Certificate(
        cases=1,
        tokens_compared=1,
        tokens_equal=1,
        batch_invariant=True,
        proof="quick",
        dtype="fp32",
        covered={},
    )
    return Manifest(
        format_version=1,
        name=NAME,
        architecture="decoder",
        task="generate",
        target="cpu",
        layout="slots",
        weights="fp32",
        generation=contract,
        files={},
        toolchain={},
        certificate=shown,
    )


def _write_tokenizer(directory: Path) -> None:
    """Write a byte-level tokenizer whose words have the length of those of GPT-2."""
    draw = random.Random(0)
    words = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    while len(words) < 256 + _NUM_WORDS:
        letters = draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 6))
        words.setdefault("\u0120" + "".join(letters), len(words))
    made = tokenizers.Tokenizer(models.BPE(words, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    made.save(str(directory / _TOKENIZER))
