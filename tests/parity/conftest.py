"""Tiny exported models of every kind that generates or labels, shared by the parity tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn

from engine.config import Device, EngineConfig
from engine.factory import load_engine
from engine.generation.async_engine import AsyncEngine
from engine.package.manifest import PackageFormat
from engine.package.package import Package, load_package
from exporter.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from exporter.models import TransformerConfig, build_model
from exporter.models.config import FeedForwardConfig, HeadConfig, PositionConfig
from tests.fakes import fake_gpu
from tests.fakes.stand_in_certificate import export_with_stand_in
from tests.fakes.traces import traced, traced_anew  # noqa: F401 - fixtures

VOCAB_SIZE = 61
BOS, EOS = 1, 2
SHAPE = {
    "d_model": 24,
    "num_heads": 3,
    "d_ff": 32,
    "vocab_size": VOCAB_SIZE,
    "tie_output": False,  # a tied one repeats its last token
}
CONFIGS = {
    "gpt": TransformerConfig(
        architecture="decoder", num_decoder_layers=1, max_target_len=40, eos_token_id=EOS, **SHAPE
    ),
    "llama": TransformerConfig(  # four query heads share one of keys
        architecture="decoder",
        num_decoder_layers=1,
        max_target_len=40,
        eos_token_id=EOS,
        positions=PositionConfig(kind="rotary"),
        num_kv_heads=1,
        key_dim=16,
        value_dim=16,
        norm="rms",
        norm_position="first",
        feed_forward=FeedForwardConfig(activation="silu", gated=True),
        **{**SHAPE, "num_heads": 4},
    ),
    "encoder-decoder": TransformerConfig(
        architecture="encoder-decoder",
        num_encoder_layers=1,
        num_decoder_layers=1,
        max_source_len=20,
        max_target_len=16,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **SHAPE,
    ),
    "labeller": TransformerConfig(
        architecture="encoder",
        head=HeadConfig(each_token=True),
        num_encoder_layers=1,
        max_source_len=20,
        labels=("NOUN", "VERB", "DET"),
        **SHAPE,
    ),
}
# Heads as wide as an int8 cache for CUDA wants them.
_WIDE = {"key_dim": 64, "value_dim": 64}
CONFIGS["llama-wide"] = CONFIGS["llama"].model_copy(update=_WIDE)
_BYTES = "abcdefghijklmnopqrstuvwxyz0123456789.,:;-+*/=<>()[]{}!?\"'"


class Exported(NamedTuple):
    """A checkpoint and the package that was exported from it."""

    checkpoint: Checkpoint
    package: Path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Keep torch from waiting for its own threads: a model this small has nothing to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Setup(NamedTuple):
    """A format of packages, and how the engine runs it."""

    form: PackageFormat = PackageFormat()
    has_bucket: bool = False  # on a CPU: decode calls of one number of rows, as on a GPU
    device: Device = "cpu"
    is_fake: bool = False  # the device: the kernels are those of the CPU
    own_process: bool = False  # its steps and memory cannot be looked at there

    def has_equal_bits(self, name: str) -> bool:
        """Whether the answers of a model have the same bits whatever else runs.

        Attention to a source, in the graphs for CUDA, rounds otherwise where one sequence attends
        to it than where the widest of a call has two; with buckets all calls have the same room.
        """
        has_bucket = self.has_bucket or self.device == "cuda"
        return self.form.target == "cpu" or name != "encoder-decoder" or has_bucket

    @property
    def in_turn(self) -> Setup:
        """One in which no step is queued before the one before it is looked at, with equal bits."""
        return Setup(self.form, has_bucket=True) if self.is_fake else self

    def load(self, package: Path | Package, config: EngineConfig) -> AsyncEngine:
        """Load a package as the engine does; on a GPU one that was shown nothing there, too."""
        package = load_package(package) if isinstance(package, Path) else package
        buckets = (config.max_num_seqs,) if self.has_bucket else ()
        config = replace(
            config, device=self.device, decode_buckets=buckets, own_process=self.own_process
        )
        with pytest.MonkeyPatch.context() as patch:
            fake_gpu.allow_unshown(patch)
            if self.is_fake:
                fake_gpu.put_in(patch)
            engine = load_engine(package, config)
        assert isinstance(engine, AsyncEngine)
        return engine


CPU = Setup()
CUDA_FP32 = Setup(PackageFormat.of("cuda", "fp32"), has_bucket=True)
CUDA_FP16 = Setup(PackageFormat.of("cuda", "fp16"), has_bucket=True)
GPU_FP32 = Setup(PackageFormat.of("cuda", "fp32"), device="cuda")
GPU_FP16 = Setup(PackageFormat.of("cuda", "fp16"), device="cuda")
FAKE_FP32, FAKE_FP16 = (gpu._replace(is_fake=True) for gpu in (GPU_FP32, GPU_FP16))


def setups(*others: Any) -> list[Any]:
    """Return the parameters of a test that goes through all setups."""
    named = {"cpu": CPU, "cuda-fp16": CUDA_FP16, "fake-gpu-fp32": FAKE_FP32}
    more = {"cuda-fp32": CUDA_FP32, "fake-gpu-fp16": FAKE_FP16}
    on_gpu = {"gpu-fp32": GPU_FP32, "gpu-fp16": GPU_FP16}
    return [
        *(pytest.param(setup, id=name) for name, setup in named.items()),
        *(pytest.param(setup, id=name, marks=pytest.mark.long) for name, setup in more.items()),
        *(pytest.param(setup, id=name, marks=pytest.mark.gpu) for name, setup in on_gpu.items()),
        *others,
    ]


def twins() -> list[Any]:
    """Return names of models of Hugging Face, each with setups that `generate` is held against."""
    found = []
    for name in ("gpt2", "marian"):
        found += [
            pytest.param(name, CPU, id=f"{name}-cpu"),
            pytest.param(name, CUDA_FP32, id=f"{name}-cuda-fp32", marks=pytest.mark.long),
            pytest.param(name, FAKE_FP32, id=f"{name}-fake-gpu-fp32", marks=pytest.mark.long),
            pytest.param(name, GPU_FP32, id=f"{name}-gpu-fp32", marks=pytest.mark.gpu),
        ]
    return found


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Exported]:
    """Export the model of a name in a format, once."""

    @cache
    def save(name: str) -> Path:
        path = tmp_path_factory.mktemp(name) / "checkpoint"
        tokenizer = word_tokenizer() if name == "labeller" else byte_tokenizer()
        save_checkpoint(path, "tiny", random_model(CONFIGS[name]), tokenizer)
        return path

    @cache
    def make(name: str, form: PackageFormat = CPU.form) -> Exported:
        return export_unproven(save(name), form)

    return make


_NUMBERS = itertools.count()


def export_unproven(checkpoint: Path, form: PackageFormat = CPU.form) -> Exported:
    """Export a checkpoint without the certificate, whose work the tests here do by the engine."""
    package = checkpoint.parent / f"package-{next(_NUMBERS)}"
    export_with_stand_in(checkpoint, package, form)
    return Exported(load_checkpoint(checkpoint), package)


def random_model(config: TransformerConfig) -> nn.Module:
    """Make a model with weights so large that what it reads shows in what it writes."""
    torch.manual_seed(1)
    model = build_model(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = 1.5 * weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.3
            centre = 1.0 if "norm.weight" in name else 0.0
            weight.copy_(centre + spread * torch.randn(weight.shape))
    return model


def word_tokenizer() -> Tokenizer:
    """Return a tokenizer of numbered words."""
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB_SIZE)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer of one-letter tokens; ids 0 to 2 are special."""
    vocabulary = {name: i for i, name in enumerate(["<pad>", "<s>", "</s>", *_BYTES])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<s>", "</s>"])
    return tokenizer
