"""Scripted models for the process of an engine: what is not one of its words is spelled."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import OutOfDeviceMemory
from engine.factory import core_on_slots
from engine.generation.parts import EngineParts, Tell
from engine.lifecycle.lifecycle import WarmUpResult
from engine.package.manifest import GenerationContract
from engine.text.constraint import ConstraintCompiler
from engine.text.tokenizer import SourceAndTarget, Tokenizer
from tests.conftest import EOS, ScriptedRunner

TEXT = b"a text of the engine"
_log = logging.getLogger("engine.scripted")


def make_scripted(
    tokenizer: Path, contract: GenerationContract, config: EngineConfig, tell: Tell
) -> EngineParts:
    """Make an engine that says the same to every prompt, at a pace that the prompt names."""
    runner = ScriptedRunner(
        _spell,
        num_slots=config.max_num_seqs,
        max_len=contract.cache.max_len,
        has_encoder=False,
    )
    texts = Tokenizer(tokenizer)
    constraints = ConstraintCompiler(texts, contract.vocab_size, contract.eos_token_ids)

    def warm_up() -> WarmUpResult:
        tell(f"in {threading.current_thread().name} tried out")
        return WarmUpResult(is_batch_invariant=False)

    tell(f"loaded by process {os.getpid()}")
    core = core_on_slots(config, contract, runner, tokenizer=texts)
    return EngineParts(core, SourceAndTarget(texts, texts), constraints, config, warm_up)


def make_nothing(tell: Tell) -> EngineParts:
    """Fail as a device does that is too small."""
    raise OutOfDeviceMemory("no room for the weights", lacking=7)


def make_by_mistake(tell: Tell) -> EngineParts:
    """Fail as nobody expects."""
    raise ZeroDivisionError("a bug")


def make_and_die(tell: Tell) -> EngineParts:
    """Have no time to say what is wrong."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def make_untried(
    tokenizer: Path, contract: GenerationContract, config: EngineConfig, how: str, tell: Tell
) -> EngineParts:
    """Load, and fail when the model is tried out."""

    def warm_up() -> WarmUpResult:
        return {"dies": make_and_die, "fails": make_nothing}[how](tell)  # type: ignore[return-value]

    made = make_scripted(tokenizer, contract, config, tell)
    return EngineParts(made.core, made.tokenizers, made.constraints, config, warm_up)


def make_slowly(tell: Tell) -> EngineParts:
    """Take the time that a large model takes."""
    tell(f"loading in process {os.getpid()}")
    time.sleep(60)
    raise AssertionError


def _spell(source: list[int], tokens: list[int]) -> int:
    prompt, _, said = bytes(tokens).partition(b">")
    match prompt:
        case b"die":
            os.kill(os.getpid(), signal.SIGKILL)
        case b"stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case b"hang":
            time.sleep(60)
        case b"fail":
            raise RuntimeError("secret detail")
        case b"slowly":
            time.sleep(0.02)
            return ord("x")
        case b"log":
            _log.warning("said %d", len(said), extra={"fields": {"said": len(said)}})
    return [*TEXT, EOS][len(said)]
