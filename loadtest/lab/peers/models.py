"""Makes random models, and every engine's form of each: the same weights for all.

`python -m loadtest.lab.peers.models gpt2 packages/peers/gpt2`; what is there already is kept.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
)

from engine.package.manifest import CacheDtype, Weights

_SEED = 0
_END, _PAD = "</s>", "<pad>"  # the last two ids; prompts have neither
_NEVER = -1e4  # logit of the end: every engine is to go on to the asked length

Builder = Callable[[Path, Path], None]  # original, out


def make(model: str, directory: Path) -> None:
    """Make what is missing; a form whose tools are not installed stays missing."""
    original = directory / "original"
    torch.set_num_threads(1)
    _once(original, lambda out: _ORIGINALS[model](out))
    tokenizer = Tokenizer.from_file(str(original / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    tokens = [tokenizer.id_to_token(i) for i in range(size)]
    (directory / "tokens.json").write_text(json.dumps(tokens))
    (directory / "vocab_size").write_text(str(size - 2))
    for name, (module, build) in _forms(model).items():
        if find_spec(module) is not None:
            _try(
                name,
                lambda build=build, name=name: _once(  # type: ignore[misc]
                    directory / name, lambda out: build(original, out)
                ),
            )


def _forms(model: str) -> dict[str, tuple[str, Builder]]:
    """Return by directory name what is needed to make a form, and what makes it."""
    forms: dict[str, tuple[str, Builder]] = {
        "checkpoint": ("exporter", _import),
        "tokenweir-fp32": ("exporter", _export("fp32")),
    }
    if model == "smollm2":
        forms["tokenweir-int4"] = ("exporter", _export("int4"))
        forms["genai-fp32"] = ("onnxruntime_genai", _genai("fp32"))
        forms["genai-int4"] = ("onnxruntime_genai", _genai("int4"))
        return forms
    forms["tokenweir-int8"] = ("exporter", _export("int8"))
    forms["ctranslate2"] = ("ctranslate2", _ctranslate2)
    if model == "gpt2":
        forms["tokenweir-int8-cache8"] = ("exporter", _export("int8", "int8"))
        forms["f32.gguf"] = ("gguf", _gguf("F32"))
        forms["q8_0.gguf"] = ("gguf", _gguf("Q8_0"))
    if model == "marian":
        forms["pairs.tsv"] = ("exporter", _write_pairs)
        forms["tokenweir-int8-fixed"] = ("exporter", _export("int8-fixed", "int8", "pairs.tsv"))
    return forms


def _gpt2(out: Path) -> None:
    config = GPT2Config(bos_token_id=50255, eos_token_id=50255, pad_token_id=50256)
    _save(GPT2LMHeadModel(config), out, _byte_level(config.vocab_size), 1.5)


def _smollm2(out: Path) -> None:
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
        bos_token_id=49150,
        eos_token_id=49150,
        pad_token_id=49151,
    )
    _save(LlamaForCausalLM(config), out, _byte_level(config.vocab_size), 1.5)


def _marian(out: Path) -> None:
    config = MarianConfig(
        vocab_size=32_000,
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        max_position_embeddings=512,
        activation_function="swish",
        scale_embedding=True,
        eos_token_id=31_998,
        forced_eos_token_id=None,
        pad_token_id=31_999,  # CTranslate2 drops the last row, which is the padding's
        decoder_start_token_id=31_999,
    )
    model = MarianMTModel(config)
    with torch.no_grad():
        model.model.shared.weight[config.pad_token_id] = 0  # the decoder starts with it
        model.final_logits_bias[0, -2:] = _NEVER
    _save(model, out, _metaspace(config.vocab_size), 1.0)


_ORIGINALS: Mapping[str, Callable[[Path], None]] = {
    "gpt2": _gpt2,
    "smollm2": _smollm2,
    "marian": _marian,
}


@torch.no_grad()
def _draw_layers(model: torch.nn.Module, gain: float) -> None:
    """Draw the layers' matrices so large that outputs depend on prompts, as trained models' do.

    With the usual small ones every output is one token again and again, whatever the prompt is, and
    that two engines agree would mean little.
    """
    for name, weight in model.named_parameters():
        if weight.ndim == 2 and weight.requires_grad and (".h." in name or "layers." in name):
            inputs = weight.shape[0] if ".c_" in name else weight.shape[1]  # GPT-2's are [in, out]
            weight.normal_(0, gain * inputs**-0.5)


def save_with_words(model: Any, out: Path) -> None:
    """Save a model of texts as it is, and a made-up tokenizer."""
    _write(model, out, _byte_level(model.config.vocab_size))


def _save(model: Any, out: Path, tokenizer: Tokenizer, gain: float) -> None:
    _draw_layers(model, gain)
    _write(model.eval(), out, tokenizer)


def _write(model: Any, out: Path, tokenizer: Tokenizer) -> None:
    model.save_pretrained(out)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, pad_token=_PAD)
    fast.save_pretrained(out)


def _byte_level(size: int) -> Tokenizer:
    """Return a tokenizer of bytes and made-up words, as large as the model's vocabulary."""
    chars = pre_tokenizers.ByteLevel.alphabet()
    words = [*sorted(chars), *(f"Ġ{_word(i)}" for i in range(size - len(chars) - 2))]
    made = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([_END, _PAD])
    return made


def _metaspace(size: int) -> Tokenizer:
    """Return a tokenizer of made-up words that begin with a space, as SentencePiece has them."""
    pieces = [("<unk>", 0.0), *((f"▁{_word(i)}", -float(i)) for i in range(size - 3))]
    made = Tokenizer(models.Unigram(pieces, 0, False))
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    made.add_special_tokens([_END, _PAD])
    return made


def _word(number: int) -> str:
    """Return a word of five letters of its own for every number."""
    letters = []
    for _ in range(5):
        number, digit = divmod(number, 26)
        letters.append(chr(ord("a") + digit))
    return "".join(letters)


def _import(original: Path, out: Path) -> None:
    from exporter.huggingface import import_checkpoint

    import_checkpoint(original, out)


def _write_pairs(original: Path, out: Path) -> None:
    """Write lines of made-up words, source and target, for scales to be fixed on."""
    words = json.loads((original.parent / "tokens.json").read_text())[1:-2]
    draw = random.Random(_SEED)

    def line(count: int) -> str:
        return " ".join(word.strip("▁") for word in draw.choices(words, k=count))

    out.write_text("".join(f"{line(25)}\t{line(32)}\n" for _ in range(200)), encoding="utf-8")


def _export(weights: Weights, kv_cache: CacheDtype = "fp32", pairs: str | None = None) -> Builder:
    def build(original: Path, out: Path) -> None:
        from exporter.export import export_package
        from exporter.prover.loss import LossLimits

        # Random weights have no favourite tokens: speed is all that is measured of these.
        limits = None if weights == "fp32" else LossLimits(1.0, 100.0, 100.0, 1.0)
        checkpoint = original.parent / "checkpoint"
        text = original.parent / pairs if pairs else None
        export_package(
            checkpoint, out, weights=weights, kv_cache=kv_cache, limits=limits, text=text
        )

    return build


def _ctranslate2(original: Path, out: Path) -> None:
    from ctranslate2.converters import TransformersConverter

    class Converter(TransformersConverter):  # type: ignore[misc]
        def load_tokenizer(self, kind: object, path: str, **options: object) -> object:
            return PreTrainedTokenizerFast.from_pretrained(path, unk_token=_END, bos_token=_END)

    Converter(str(original)).convert(str(out))


def _genai(precision: str) -> Builder:
    def build(original: Path, out: Path) -> None:
        options = {
            "-i": original,
            "-o": out,
            "-p": precision,
            "-e": "cpu",
            "-c": out.parent / "cache",
        }
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
        command += [str(part) for option in options.items() for part in option]
        subprocess.run([*command, "--extra_options", "hf_token=false"], check=True)

    return build


def _gguf(weights: str) -> Builder:
    def build(original: Path, out: Path) -> None:
        from loadtest.lab.peers.gguf_gpt2 import write_gguf

        write_gguf(original, out, weights)

    return build


def _try(name: str, build: Callable[[], None]) -> None:
    try:
        build()
    except Exception as error:  # from any library; the others are compared without it
        print(f"cannot make {name}: {type(error).__name__}: {error}", file=sys.stderr)


def _once(path: Path, build: Callable[[Path], None]) -> None:
    """Build a file or directory elsewhere, under its own name, and move it when it is whole."""
    if path.exists():
        return
    unfinished = path.parent / "unfinished" / path.name
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    if unfinished.is_dir():
        shutil.rmtree(unfinished)
    print(f"making {path}", flush=True)
    build(unfinished)
    unfinished.rename(path)


def main(arguments: Sequence[str]) -> None:
    """Make the model named by the first argument in the directory named by the second."""
    torch.manual_seed(_SEED)
    make(arguments[0], Path(arguments[1]))


if __name__ == "__main__":
    main(sys.argv[1:])
