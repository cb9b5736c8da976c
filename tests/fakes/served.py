"""`tokenweir` in processes of its own, as a person types it, and a server that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenweir import Client

from engine.package.manifest import PackageFormat
from engine.requests.generation_defaults import GenerationDefaults
from exporter.checkpoint import save_checkpoint
from exporter.models import TransformerConfig, build_model
from loadtest.lab.serve import free_port
from tests.fakes.stand_in_certificate import export_with_stand_in

_MODEL = TransformerConfig(
    architecture="decoder",
    num_decoder_layers=1,
    max_target_len=16,
    d_model=16,
    num_heads=2,
    d_ff=16,
    vocab_size=16,
    eos_token_id=2,
)
_COMMAND = [sys.executable, "-c", "from server.cli import main; main()"]


def word_tokenizer(size: int) -> Tokenizer:
    """Return one whose words are their ids: w0, w1 and so on."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(size)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def tiny_package(
    folder: Path,
    config: TransformerConfig = _MODEL,
    tokenizer: Tokenizer | None = None,
    generation: GenerationDefaults = GenerationDefaults(),  # frozen
) -> Path:
    """Export a random decoder, by default one that answers at once; FOLDER/checkpoint is its."""
    checkpoint, package = folder / "checkpoint", folder / "package"
    words = tokenizer or word_tokenizer(config.vocab_size)
    torch.manual_seed(0)
    save_checkpoint(checkpoint, "continue", build_model(config), words, generation=generation)
    export_with_stand_in(checkpoint, package, PackageFormat())
    return package


def typed(folder: Path, *arguments: str) -> str:
    """Run a command in a folder, and return what it prints; it has to succeed."""
    ended = subprocess.run(
        [*_COMMAND, *arguments], cwd=folder, env=_environment(), capture_output=True
    )
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout.decode()


@contextmanager
def served(
    folder: Path,
    package: str,
    *options: str,
    front: Sequence[str] = (),
    command: Sequence[str] = _COMMAND,
    environment: Mapping[str, str] | None = None,
    host: str = "127.0.0.1",
    port: int | None = None,
) -> Iterator[Client]:
    """Serve a package, behind a command that becomes ours, and end that with Ctrl-C."""
    log, port = folder / "serve.log", port or free_port()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*front, *command, "serve", package, "--port", str(port), *options],
            cwd=folder,
            env={**_environment(), **(environment or {})},
            stdout=file,
            stderr=file,
        )
    try:
        ends = time.monotonic() + 240
        while b"Ctrl-C stops" not in log.read_bytes():
            assert process.poll() is None and time.monotonic() < ends, log.read_text()
            time.sleep(0.1)
        with Client(f"{host}:{port}") as client:
            yield client
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, log.read_text()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
