"""Fixtures for everybody: an engine on a scripted model, whose every token a test decides."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from engine.config import EngineConfig
from engine.factory import core_on_slots
from engine.generation.async_engine import AsyncEngine
from engine.generation.core import EngineCore
from engine.package.manifest import (
    CacheShape,
    GenerationContract,
    GenerationDefaults,
    Manifest,
)
from engine.package.package import Package
from engine.sampling.logits import StepLogits
from engine.sampling.top_k import step_logits
from engine.slots.batch import RowLengths, RowOp, ScheduledBatch
from engine.text.chat_format import ChatFormat
from engine.text.chat_template import ChatTemplate
from engine.text.constraint import ConstraintCompiler
from engine.text.tokenizer import SourceAndTarget, Tokenizer
from server import process
from tests.fakes.clock import FakeClock
from tests.fakes.stand_in_certificate import certificate

BOS, EOS = 256, 257  # ids 0 to 255 are bytes
VOCAB_SIZE = 258

# The likeliest next token, or all logits, behind a source (or none) and the tokens so far.
Script = Callable[[list[int], list[int]], int | np.ndarray]


# A test may run a command in this process, where gRPC is as clients have it.
process.prepare_to_relay = lambda: None  # type: ignore[assignment]

for name, count in (("few examples", 60), ("many examples", 1000)):  # the latter: make test-long
    hypothesis.settings.register_profile(
        name,
        max_examples=count,
        deadline=None,  # however slow or busy the machine
        suppress_health_check=[hypothesis.HealthCheck.too_slow],
    )
hypothesis.settings.load_profile("few examples")


if "PYTEST_XDIST_WORKER" in os.environ:  # processes beside each other: threads would wait in turns
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # which torch reads when it is imported


gc.disable()  # until all is imported, a sixth of whose time it takes


def pytest_collection_finish() -> None:
    """Leave modules out of garbage collections, and have few: an export makes a million objects."""
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def signals_as_in_a_terminal() -> Iterator[None]:
    """A shell has its background jobs ignore Ctrl-C, and `nohup` SIGHUP; tests send both."""
    handlers = {signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def never_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no load test be late: it shares a process with its server, the machine with others."""
    monkeypatch.setattr("loadtest.metrics.MAX_DELAY", 10.0)
    monkeypatch.setattr("loadtest.metrics.MAX_SHARE", 10.0)
    monkeypatch.setattr("loadtest.runner.MAX_DELAY", 10.0)


class ScriptedRunner:
    """A ModelRunner without a model: its rows hold token ids, and a script continues them.

    It refuses what the kernel would refuse or get wrong, so that every test that runs on it also
    checks how rows are kept.
    """

    def __init__(self, script: Script, *, num_slots: int, max_len: int, has_encoder: bool) -> None:
        self.script = script
        self.batches: list[ScheduledBatch] = []
        self.before_step: Callable[[], None] = lambda: None  # to block or to fail
        self.num_padding = 0
        self.is_on_device = self.has_sampling_graphs = False
        self._num_slots, self._max_len, self._has_encoder = num_slots, max_len, has_encoder
        self.reset()

    def reset(self) -> None:
        self.rows: list[list[int]] = [[] for _ in range(self._num_slots)]
        self.sources: list[list[int]] = [[] for _ in range(self._num_slots)]

    @property
    def row_lengths(self) -> RowLengths:
        return RowLengths(tuple(map(len, self.rows)), tuple(map(len, self.sources)))

    def start(self, batch: ScheduledBatch, *of_a_device: object) -> Callable[[], StepLogits]:
        self.before_step()
        self.batches.append(batch)
        for op in batch.row_ops:
            self._change_row(op)
        for encode in batch.encodes:
            assert not self.sources[encode.row]
            self.sources[encode.row] = list(encode.source_ids)
        behind_chunks = []
        for chunk in batch.chunks:
            silent = len(chunk.token_ids) - chunk.num_logits
            self.rows[chunk.row] += chunk.token_ids[:silent]
            behind_chunks += [
                self._append(chunk.row, token, chunk.source_row)
                for token in chunk.token_ids[silent:]
            ]
        sources = batch.decode_sources or [0] * len(batch.decode_ids)
        behind_rows = [
            self._append(row, token, source)
            for row, (token, source) in enumerate(zip(batch.decode_ids, sources, strict=True))
        ]
        logits = np.asarray([*behind_rows, *behind_chunks], np.float32).reshape(-1, VOCAB_SIZE)
        found = step_logits(logits, batch.num_top)
        return lambda: found

    def _change_row(self, op: RowOp) -> None:
        origin, target = op.origin, op.target
        if op.kind == "swap":
            self.rows[origin], self.rows[target] = self.rows[target], self.rows[origin]
        elif op.kind in ("cut_source", "clear_source"):
            self.sources[target] = []
        elif op.kind == "copy_source":
            assert not self.sources[target], "the row is not empty"
            self.sources[target] = list(self.sources[origin])
        elif op.kind in ("cut", "clear"):
            self.rows[target] = self.rows[target][: op.start]
        else:
            assert op.kind == "copy" or not self.rows[target], "the row is not empty"
            assert self.rows[target][: op.start] == self.rows[origin][: op.start]
            self.rows[target] = self.rows[origin][: op.stop]
            if op.kind == "move":
                self.rows[origin] = []

    def _append(self, row: int, token_id: int, source_row: int) -> np.ndarray:
        source = self.sources[source_row] if self._has_encoder else []
        assert bool(source) == self._has_encoder, "the row's source is not encoded"
        self.rows[row].append(token_id)
        assert len(self.rows[row]) <= self._max_len, "the row is full"
        answer = self.script(source, self.rows[row])
        if isinstance(answer, np.ndarray):
            return answer
        logits = np.zeros(VOCAB_SIZE, np.float32)
        logits[answer] = 9.0
        return logits


@pytest.fixture
def spell() -> Callable[[str], Script]:
    """Make a script that continues every prompt that ends in ">" with a text and then EOS."""

    def make(text: str) -> Script:
        answer = [*text.encode(), EOS]

        def script(source: list[int], tokens: list[int]) -> int:
            start = 1 if source else tokens.index(ord(">")) + 1
            return answer[min(len(tokens) - start, len(answer) - 1)]

        return script

    return make


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def make_contract() -> Callable[..., GenerationContract]:
    """Make the contract of a model over bytes."""

    def make(
        *, max_len: int = 64, max_source_len: int | None = None, **more: object
    ) -> GenerationContract:
        cache = CacheShape(num_layers=1, num_kv_heads=1, max_len=max_len, head_dim=1)
        is_decoder = max_source_len is None
        return GenerationContract(
            vocab_size=VOCAB_SIZE,
            num_heads=1,
            cache=cache,
            cross_cache=None
            if is_decoder
            else cache.model_copy(update={"max_len": max_source_len}),
            decoder_start_token_id=None if is_decoder else BOS,
            **{"eos_token_ids": (EOS,), **more},
        )

    return make


@pytest.fixture
def make_core(
    make_contract: Callable[..., GenerationContract], byte_tokenizer: Tokenizer, clock: FakeClock
) -> object:
    """Make a core on a scripted model; return both."""

    def make(
        script: Script, *, config: EngineConfig | None = None, **shape: int
    ) -> tuple[EngineCore, ScriptedRunner]:
        config = config or EngineConfig(max_num_seqs=4)
        contract = make_contract(**shape)
        runner = ScriptedRunner(
            script,
            num_slots=config.max_num_seqs,
            max_len=contract.cache.max_len,
            has_encoder=contract.cross_cache is not None,
        )
        core = core_on_slots(config, contract, runner, tokenizer=byte_tokenizer, clock=clock)
        return core, runner

    return make


@pytest.fixture(scope="session")
def byte_tokenizer(byte_tokenizer_file: Path) -> Tokenizer:
    """A tokenizer whose ids are the bytes of the text."""
    return Tokenizer(byte_tokenizer_file)


@pytest.fixture(scope="session")
def byte_tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the same."""
    chars = _byte_chars()
    made = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(chars)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<s>", "</s>"])
    path: Path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.fixture
def make_package(make_contract: Callable[..., GenerationContract]) -> Callable[..., Package]:
    """Make the package of a model over bytes; its directory does not exist."""

    def make(**shape: int) -> Package:
        manifest = Manifest(
            format_version=1,
            name="scripted",
            architecture="encoder-decoder" if "max_source_len" in shape else "decoder",
            task="generate",
            target="cpu",
            layout="slots",
            weights="fp32",
            generation=make_contract(**shape),
            files={},
            toolchain={},
            certificate=certificate(),
        )
        return Package(path=Path("scripted"), manifest=manifest, manifest_sha256=b"\0" * 32)

    return make


@pytest.fixture
def scripted_engine(
    make_package: Callable[..., Package], byte_tokenizer: Tokenizer
) -> Callable[..., tuple[AsyncEngine, ScriptedRunner]]:
    """Make an engine on a scripted model, for a worker that starts and stops it."""

    def make(
        script: Script,
        *,
        config: EngineConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        defaults: GenerationDefaults | None = None,
        chat: ChatFormat | None = None,
        **shape: int,
    ) -> tuple[AsyncEngine, ScriptedRunner]:
        config = config or EngineConfig(max_num_seqs=4)
        package = make_package(**shape)
        if defaults is not None:
            manifest = package.manifest.model_copy(update={"defaults": defaults})
            package = package.model_copy(update={"manifest": manifest})
        contract = package.manifest.generation
        assert contract is not None
        runner = ScriptedRunner(
            script,
            num_slots=config.max_num_seqs,
            max_len=contract.cache.max_len,
            has_encoder=contract.cross_cache is not None,
        )
        core = core_on_slots(config, contract, runner, tokenizer=byte_tokenizer, clock=clock)
        constraints = ConstraintCompiler(
            byte_tokenizer, contract.vocab_size, contract.eos_token_ids
        )
        engine = AsyncEngine(
            package,
            core,
            SourceAndTarget(byte_tokenizer, byte_tokenizer),
            config,
            constraints=constraints,
            chat=None if chat is None else ChatTemplate(chat),
            clock=clock,
        )
        return engine, runner

    return make


@pytest.fixture
async def make_engine(
    scripted_engine: Callable[..., tuple[AsyncEngine, ScriptedRunner]],
) -> AsyncIterator[Callable[..., Awaitable[tuple[AsyncEngine, ScriptedRunner]]]]:
    """Make and start an engine on a scripted model; it is stopped after the test."""
    engines: list[AsyncEngine] = []

    async def make(script: Script, **more: Any) -> tuple[AsyncEngine, ScriptedRunner]:
        engine, runner = scripted_engine(script, **more)
        engines.append(engine)
        await engine.start()
        return engine, runner

    yield make
    for engine in engines:
        await engine.stop()


def _byte_chars() -> list[str]:
    """Return the characters that stand for bytes 0 to 255 in a byte-level vocabulary."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(0x100)]
