"""Makes the engine that a package needs."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from engine.config import DEFAULT_NUM_SEQS, Device, EngineConfig
from engine.errors import PackageError
from engine.lifecycle.engine import NICENESS
from engine.lifecycle.lifecycle import WarmUpResult
from engine.package.graph_io import SAMPLING_GRAPHS
from engine.package.manifest import GenerationContract, Manifest
from engine.package.package import Package

if TYPE_CHECKING:
    from engine.cuda.device import CudaDevice
    from engine.generation.async_engine import AsyncEngine
    from engine.generation.core import EngineCore
    from engine.generation.parts import EngineParts, Tell
    from engine.one_pass.engine import EncoderEngine
    from engine.slots.runner import ModelRunner, SlotModelRunner
    from engine.text.chat_template import ChatTemplate
    from engine.text.tokenizer import SourceAndTarget, Tokenizer

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

TARGET_TOKENIZER_NAME = "target_tokenizer.json"  # if the output has its own


def load_engine(
    package: Package, config: EngineConfig, *, tell: Callable[[str], None] | None = None
) -> AsyncEngine | EncoderEngine:
    """Load the graphs of a checked package; the engine is to be started by the caller.

    While it starts on a device, `tell` is given a line for every call that is captured there, in
    the engine's thread, or if that has a process on the event loop; without it they go to the log.

    Raises PackageError if a graph or the tokenizer is not what the manifest says, or if a file was
    changed since it was checked, or if nothing shows what it gives on this device, in decode calls
    of these numbers of rows; ConfigError if the package was not made for the device, or no
    onnxruntime is installed that has it; DeviceError if there is none; OutOfDeviceMemory if it has
    no room for so many sequences.
    """
    where = device_of(package.manifest, package.path, config)
    engine: AsyncEngine | EncoderEngine
    if package.manifest.generation is None:
        engine = _load_one_pass(package, config, where)
    elif config.has_own_process(where):
        engine = _load_in_process(package, config, where, tell or _log.info)
    else:
        engine = _load_in_thread(package, config, where, tell or _log.info)
    package.check_unchanged()
    return engine


def device_of(manifest: Manifest, place: Path | str, config: EngineConfig) -> Device:
    """Return where the package at a place runs with these settings.

    Raises ConfigError if it was not made for the device, PackageError if nothing computes its
    precision there.
    """
    device = config.device_for(manifest.target)
    if device == "cpu" and manifest.precision == "bf16":
        raise PackageError(
            f"{place}: onnxruntime has no kernels for bf16 on a CPU; run it with "
            "--device cuda, or export the model with --precision fp16"
        )
    return device


# onnxruntime takes long to import: what only reads packages must not pay for it.


def _opened(
    package: Package, config: EngineConfig, where: Device
) -> tuple[CudaDevice | None, EngineConfig]:
    """Return the GPU that a package is to run on, and the settings that it was shown with.

    None: it runs on the CPU.
    """
    if where == "cpu":
        return None, config
    from engine.cuda.certificate import settings_as_shown
    from engine.cuda.device import open_device

    device = open_device()
    return device, settings_as_shown(package, device, config)


def _load_in_thread(
    package: Package, config: EngineConfig, where: Device, tell: Tell
) -> AsyncEngine:
    from engine.generation.async_engine import AsyncEngine

    parts = _nicely(where, lambda: load_parts(package, config, tell))
    return AsyncEngine(
        package,
        parts.core,
        parts.tokenizers,
        parts.config,
        constraints=parts.constraints,
        chat=_load_chat(package),
        warm_up=parts.warm_up,
    )


def _load_in_process(
    package: Package, config: EngineConfig, where: Device, tell: Tell
) -> AsyncEngine:
    from engine.generation.async_engine import AsyncEngine
    from engine.own_process.engine_process import EngineProcess

    chat, tokenizers = _load_chat(package), _load_tokenizers(package)
    process = EngineProcess(
        package.manifest.name,
        partial(load_parts, package, config),
        config.max_step_seconds,
        niceness=NICENESS if where == "cpu" else 0,
        tell=tell,
    )
    return AsyncEngine(package, process, tokenizers, process.config, constraints=process, chat=chat)


def load_parts(package: Package, config: EngineConfig, tell: Tell) -> EngineParts:
    """Load what an engine is made of, in the process that runs it; errors as of `load_engine`."""
    from engine.generation.parts import EngineParts
    from engine.slots.invariance import rows_are_bit_equal
    from engine.slots.largest_step import largest_step_seconds
    from engine.slots.warm_up import warm_up
    from engine.text.constraint import ConstraintCompiler

    contract = package.manifest.generation
    assert contract is not None, "it generates"
    device, config = _opened(package, config, device_of(package.manifest, package.path, config))
    tokenizers = _load_tokenizers(package)
    runner = load_runner(package, contract, config, device)
    config = config.with_num_seqs(runner.num_slots)

    def warm() -> WarmUpResult:
        name = package.manifest.name
        warm_up(runner, contract, package.path, progress=lambda line: tell(f"{name}: {line}"))
        seconds = largest_step_seconds(runner, contract, config, package.path)
        widest = config.limits.most_sequences
        is_equal = _shown(
            package, config, device, lambda: rows_are_bit_equal(runner, contract, widest)
        )
        return WarmUpResult(is_equal, seconds)

    return EngineParts(
        core_on_slots(config, contract, runner, tokenizer=tokenizers.target),
        tokenizers,
        ConstraintCompiler(tokenizers.target, contract.vocab_size, contract.eos_token_ids),
        config,
        warm,
    )


def _nicely(where: Device, load: Callable[[], _T]) -> _T:
    """Load graphs so that their threads are as nice to others as the engine's, which they help.

    If they were less nice, they would wait, spinning, on the processor that it is to run on.
    """
    if where != "cpu" or sys.platform != "linux":
        return load()
    with ThreadPoolExecutor(1, initializer=lambda: os.nice(NICENESS)) as thread:
        return thread.submit(load).result()


def load_runner(
    package: Package,
    contract: GenerationContract,
    config: EngineConfig,
    device: CudaDevice | None,
) -> SlotModelRunner:
    """Load the graphs of a generating model as they are served; errors as of `load_engine`."""
    from engine.slots.generation_sessions import load_sessions
    from engine.slots.runner import SlotModelRunner

    decoder = package.file("decoder.onnx")
    encoder = package.file("encoder.onnx") if contract.cross_cache is not None else None
    threads, widest = config.num_threads, config.limits.most_sequences
    sessions = load_sessions(contract, decoder, encoder, num_threads=threads, device=device)
    if device is None:
        num_slots = config.with_num_seqs(DEFAULT_NUM_SEQS).max_num_seqs
        return SlotModelRunner(
            contract,
            *sessions,
            num_slots=num_slots,
            buckets=config.decode_buckets,
            widest_group=widest,
        )
    from engine.cuda.room import DeviceRoom, fit
    from engine.cuda.sampling_calls import sampling_calls_of

    graphs = [device.create_session(package.file(name)) for name in SAMPLING_GRAPHS]
    draws = sampling_calls_of(graphs, contract.vocab_size)
    weights = sum(file.size for name, file in package.manifest.files.items() if ".onnx" in name)
    room = DeviceRoom.read(device.runtime, config.gpu_memory_utilization, weights)
    found = fit(config, contract, room)
    num_slots = found.config.max_num_seqs
    buckets = config.decode_buckets or (num_slots,)
    with found.explained(device.runtime):
        return SlotModelRunner(
            contract,
            *sessions,
            draws,
            num_slots=num_slots,
            buckets=buckets,
            device=device,
            num_tokens=config.max_num_batched_tokens,
            widest_group=widest,
        )


def core_on_slots(
    config: EngineConfig,
    contract: GenerationContract,
    model: ModelRunner,
    *,
    tokenizer: Tokenizer | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> EngineCore:
    """Return the inner loop on a model whose cache has a row for each of `max_num_seqs`.

    `tokenizer` makes the text in which stop strings are found.
    """
    from engine.generation.core import EngineCore
    from engine.sampling.sampler import Sampler
    from engine.scheduling.scheduler import Scheduler
    from engine.slots.cache import SlotKVCache
    from engine.slots.step_runner import SlotStepRunner

    cache = SlotKVCache(config, contract)
    scheduler = Scheduler(config, contract, cache, tokenizer=tokenizer, clock=clock)
    return EngineCore(scheduler, SlotStepRunner(model, Sampler()))


def _load_one_pass(package: Package, config: EngineConfig, where: Device) -> EncoderEngine:
    from engine.one_pass.engine import EncoderEngine
    from engine.one_pass.warm_up import warm_up_one_pass
    from engine.package.graph_io import check_graphs, one_pass_shape
    from engine.session import create_session

    device, config = _opened(package, config, where)
    config = config.with_num_seqs(DEFAULT_NUM_SEQS)
    text = package.manifest.encoding
    tokenizer = None
    if text is not None:
        tokenizer = _load_tokenizer(
            package, text.vocab_size, cut_at=text.cut_at, cuts_left=text.cuts_left
        )
    path = package.file("model.onnx")
    threads = config.num_threads
    if device is None:
        session = _nicely(where, lambda: create_session(path, num_threads=threads))
    else:
        session = device.create_session(path)
    check_graphs((session, one_pass_shape(package.manifest.contract)))

    def warm() -> WarmUpResult:
        found = warm_up_one_pass(session, package.manifest, tokenizer, config, package.path)
        is_equal = _shown(package, config, device, lambda: found.is_batch_invariant)
        return replace(found, is_batch_invariant=is_equal)

    return EncoderEngine(package, session, tokenizer, config, warm_up=warm)


def _shown(
    package: Package,
    config: EngineConfig,
    device: CudaDevice | None,
    are_bit_equal: Callable[[], bool],
) -> bool:
    """Return if the bits of a row depend on no other here; say so if the certificate is better.

    A device shows it when its certificate is made, in the calls that are made here.
    """
    if device is not None:
        from engine.cuda.certificate import is_invariant_as_shown

        return is_invariant_as_shown(package, config)
    if not package.manifest.certificate.batch_invariant:
        return False
    if are_bit_equal():
        return True
    _log.warning(
        "%s: rows are not bit-equal alone and among others on this machine with so many threads, "
        "as they were where it was exported; batch_invariant is not offered",
        package.path,
    )
    return False


def _load_tokenizers(package: Package) -> SourceAndTarget:
    from engine.text.tokenizer import SourceAndTarget, Tokenizer

    contract = package.manifest.generation
    assert contract is not None, "it generates"
    source = _load_tokenizer(package, contract.prompt_vocab_size)
    if TARGET_TOKENIZER_NAME not in package.manifest.files:
        return SourceAndTarget(source, source)
    target = Tokenizer(package.file(TARGET_TOKENIZER_NAME), contract.vocab_size)
    return SourceAndTarget(source, target)


def _load_chat(package: Package) -> ChatTemplate | None:
    """Return what makes texts of conversations; None: the model was not trained with any."""
    from engine.text.chat_format import CHAT_NAME, read_chat_format
    from engine.text.chat_template import ChatTemplate

    if CHAT_NAME not in package.manifest.files or package.manifest.architecture != "decoder":
        return None
    try:
        return ChatTemplate(read_chat_format(package.file(CHAT_NAME)))
    except ValueError as error:
        raise PackageError(
            f"{package.path}: {CHAT_NAME}: {error}; export the model again"
        ) from error


def _load_tokenizer(
    package: Package, vocab_size: int, *, cut_at: int | None = None, cuts_left: bool = False
) -> Tokenizer:
    from engine.text.tokenizer import Tokenizer

    file = package.file("tokenizer.json")
    return Tokenizer(file, vocab_size, cut_at=cut_at, cuts_left=cuts_left)
