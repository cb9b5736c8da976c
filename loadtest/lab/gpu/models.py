"""The models of the check: those of the demo, and shapes of well-known ones with random weights.

A shape is what `config.json` of Hugging Face would say; ours is what an import makes of it. The
small ones, for right answers, have heads as wide and as shared as real ones, by which kernels of
attention are chosen. The whole ones are for speed alone: nothing is proven of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast
from unittest import mock

import torch
from tokenizers import Tokenizer, models

from engine.cuda.certificate import use_of
from engine.cuda.device import open_device
from engine.package.manifest import (
    Certificate,
    DeviceCertificate,
    Judged,
    PackageFormat,
    Precision,
    Quantiles,
    Weights,
)
from engine.package.package import MANIFEST_NAME, read_manifest, write_manifest
from exporter.checkpoint import save_checkpoint
from exporter.export import export_package
from exporter.huggingface.family import Original
from exporter.huggingface.generation import read_options
from exporter.huggingface.reading import family_of, read_config
from exporter.models import TransformerConfig, build_model
from exporter.prover.loss import LossLimits
from exporter.tasks import TASKS, build_task
from loadtest.lab.gpu.part import Settings

_ENDS = {"bos_token_id": 0, "eos_token_id": 0}
_WHOLE: Mapping[str, Mapping[str, Any]] = {
    "gpt2-124m": {"model_type": "gpt2", "vocab_size": 50_257, **_ENDS},
    "llama-1b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "tie_word_embeddings": True,
        **_ENDS,
    },
    "marian-base": {
        "model_type": "marian",
        "vocab_size": 58_101,
        "d_model": 512,
        **{f"{side}_layers": 6 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 2048 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 8 for side in ("encoder", "decoder")},
        "max_position_embeddings": 512,
        "activation_function": "swish",
        "scale_embedding": True,
        "pad_token_id": 1,
        "decoder_start_token_id": 1,
        **_ENDS,
    },
}
WHOLE = tuple(_WHOLE)
_FEW = {"vocab_size": 512, "max_position_embeddings": 64}
_SMALL: Mapping[str, Mapping[str, Any]] = {  # by model_type
    "gpt2": {"vocab_size": 512, "n_positions": 64, "n_layer": 2, "n_embd": 256, "n_head": 4},
    "llama": {**_FEW, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
    | {"num_attention_heads": 4, "num_key_value_heads": 1},
    "marian": {
        **_FEW,
        "d_model": 256,
        **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
        **{f"{side}_ffn_dim": 512 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    },
}
_QUICK_LENGTH = 16  # tokens, for a trial of the check itself
_LENGTHS = ("n_positions", "max_position_embeddings", "max_source_len", "max_target_len")
_NUM_WORDS = 200  # in a tokenizer that nobody reads
# Random weights have no favourite tokens: what they lose is counted, and held to on the device.
_ANY_LOSS = LossLimits(1.0, 100.0, 100.0, 1.0)


def shape_of(name: str, *, quick: bool) -> dict[str, Any]:
    """Return what `config.json` of Hugging Face says of a shape."""
    said = next(one for whole, one in _WHOLE.items() if whole.startswith(name))
    if name not in _WHOLE or quick:
        said = {**said, **_SMALL[said["model_type"]]}
    if quick:
        said = {**said, **{key: _QUICK_LENGTH for key in said if key in _LENGTHS}}
    return dict(said)


def form_of(name: str) -> PackageFormat:
    """Return a format by its name, such as "fp16", "fp16.int4" or "bf16.kv-int8"."""
    given, _, rounded = name.partition(".")
    precision = cast(Precision, given)
    if rounded == "kv-int8":
        return PackageFormat.of("cuda", precision, None, "int8")
    return PackageFormat.of("cuda", precision, cast(Weights, rounded) or None)


def make_checkpoint(settings: Settings, name: str) -> Path:
    """Return the checkpoint of a model with random weights; it is made if it is not there."""
    path = settings.work / name / "checkpoint"
    if path.is_dir():
        return path
    torch.manual_seed(0)
    tokenizer: Tokenizer | None
    if name in TASKS:  # as it is before its first step of training
        task = build_task(name)
        config, tokenizer = task.config, task.tokenizer
        if settings.quick:
            lengths = (name for name in _LENGTHS if getattr(config, name, None))
            config = config.changed(dict.fromkeys(lengths, _QUICK_LENGTH))
    else:
        config = converted(shape_of(name, quick=settings.quick))
        words = {str(i): i for i in range(_NUM_WORDS)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    save_checkpoint(path, name, build_model(config), tokenizer)
    return path


def make_package(settings: Settings, name: str) -> Path:
    """Return the package "MODEL.FORMAT", exported unless it is there: whole shapes unproven."""
    model, _, form_name = name.partition(".")
    form, out = form_of(form_name), settings.work / model / form_name
    if (out / MANIFEST_NAME).is_file():
        return out
    checkpoint = make_checkpoint(settings, model)

    def export(**options: Any) -> None:
        export_package(
            checkpoint,
            out,
            name=model,
            target="cuda",
            precision=form.precision,
            weights=form.weights,
            kv_cache=form.kv_cache,
            proof="quick",
            **options,
        )

    if model in WHOLE:
        with mock.patch("exporter.export.prove", _prove_nothing):
            export()
    else:
        export(**({"limits": _ANY_LOSS} if form.is_lossy else {}))
    return out


def serve_unproven(package: Path, buckets: tuple[int, ...]) -> None:
    """Make a package loadable here, in decode calls of so many rows, for its speed alone."""
    device, manifest = open_device(), read_manifest(package)
    use = use_of(device, buckets)
    shown = DeviceCertificate(
        gpu=use.gpu,
        driver=use.driver,
        onnxruntime=use.onnxruntime,
        buckets=use.buckets,
        digest="0" * 64,
        **_NOTHING,
    )
    certificate = manifest.certificate.model_copy(update={"device": shown})
    write_manifest(manifest.model_copy(update={"certificate": certificate}), package)


_ZEROS = Quantiles(median=0, p90=0, p99=0, largest=0)
_JUDGED = Judged(
    play="nothing was compared",
    what="logits",
    positions=1,
    exported=_ZEROS,
    eager=_ZEROS,
    runs=1,
    floor=0,
)
_NOTHING: dict[str, Any] = {  # the least that a manifest may say
    "cases": 1,
    "tokens_compared": 1,
    "tokens_equal": 1,
    "batch_invariant": False,
    "judged": (_JUDGED,),
}


def _prove_nothing(_: object, directory: Path, form: PackageFormat, **__: object) -> Certificate:
    """Stand in for the proof of an export."""
    half = (_JUDGED,) if form.has_half_stage else ()
    return Certificate(proof="quick", dtype=str(form), covered={}, half=half, **_NOTHING)


def converted(said: dict[str, Any]) -> TransformerConfig:
    """Return a shape in our terms, as an import reads it."""
    path = Path(said["model_type"], "config.json")
    family = family_of(said, path.parent)
    assert family is not None, "shapes are of families"
    tokens = read_options(said, None, path).special_tokens()
    return family.read_config(Original(read_config(said, path), tokens, said))
