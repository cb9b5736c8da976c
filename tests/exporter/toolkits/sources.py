"""Tiny random checkpoints in the form in which OpenNMT-py and fairseq save theirs."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

WIDTH, INNER, LAYERS, HEADS = 16, 24, 2, 2
SOURCE_WORDS = [f"quelle{i}" for i in range(33)]
TARGET_WORDS = [f"ziel{i}" for i in range(29)]
OPENNMT_SPECIAL = ["<unk>", "<blank>", "<s>", "</s>"]
FAIRSEQ_OPTIONS: dict[str, Any] = {
    "arch": "transformer_iwslt_de_en",
    "task": "translation",
    "source_lang": "de",
    "target_lang": "en",
    "encoder_embed_dim": WIDTH,
    "decoder_embed_dim": WIDTH,
    "encoder_ffn_embed_dim": INNER,
    "decoder_ffn_embed_dim": INNER,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS,
    "encoder_normalize_before": False,
    "decoder_normalize_before": False,
    "encoder_learned_pos": False,
    "decoder_learned_pos": False,
    "layernorm_embedding": False,
    "no_scale_embedding": False,
    "share_all_embeddings": False,
    "share_decoder_input_output_embed": True,
    "activation_fn": "relu",
    "adaptive_softmax_cutoff": None,
    "encoder_layers_to_keep": None,
    "max_source_positions": 20,
    "max_target_positions": 20,
    "dropout": 0.3,
    "lr": [0.0005],
}
OPENNMT_OPTIONS: dict[str, Any] = {
    "encoder_type": "transformer",
    "decoder_type": "transformer",
    "model_type": "text",
    "position_encoding": True,
    "max_relative_positions": 0,
    "layers": LAYERS,
    "enc_layers": LAYERS,
    "dec_layers": LAYERS,
    "word_vec_size": WIDTH,
    "src_word_vec_size": WIDTH,
    "tgt_word_vec_size": WIDTH,
    "heads": HEADS,
    "transformer_ff": INNER,
    "pos_ffn_activation_fn": "relu",
    "self_attn_type": "scaled-dot",
    "share_embeddings": False,
    "share_decoder_embeddings": False,
    "copy_attn": False,
    "generator_function": "softmax",
    "dropout": [0.1],
    "lora_layers": [],
}


class Source(NamedTuple):
    """A saved checkpoint."""

    path: Path
    options: Namespace
    weights: dict[str, Tensor]  # by the names of today


class Draw:
    """Draws weights so large that any fault shows: zero biases and unit norms would hide some."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self._random = torch.Generator().manual_seed(7)

    def table(self, name: str, *shape: int, std: float = 0.5) -> None:
        self.weights[name] = std * torch.randn(*shape, generator=self._random)

    def linear(self, name: str, rows: int, columns: int, *, bias: bool = True) -> None:
        self.table(f"{name}.weight", rows, columns, std=0.3)
        if bias:
            self.table(f"{name}.bias", rows, std=0.2)

    def norm(self, name: str, *, bias: bool = True) -> None:
        self.table(f"{name}.weight", WIDTH, std=0.2)
        self.weights[f"{name}.weight"] += 1.0
        if bias:
            self.table(f"{name}.bias", WIDTH, std=0.2)

    def copy(self, name: str, of: str) -> None:
        self.weights[name] = self.weights[of]


def save_fairseq(directory: Path, *, form: str = "args", **options: Any) -> Source:
    """Save a model; `form` is args, cfg, nested (a cfg of dictionaries) or 2018."""
    args = Namespace(**{**FAIRSEQ_OPTIONS, **options})
    words = {"de": SOURCE_WORDS, "en": TARGET_WORDS}
    if args.share_all_embeddings:
        words["en"] = SOURCE_WORDS
    weights = _fairseq_weights(args, len(words["de"]) + 4, len(words["en"]) + 4)
    stored = OrderedDict(_aged(weights) if form == "2018" else weights)
    content: dict[str, Any] = {"args": args, "model": stored, "extra_state": {"epoch": 3}}
    if form in ("cfg", "nested"):
        model = args if form == "cfg" else _nested(args)
        task = {"_name": "translation", "source_lang": "de", "target_lang": "en"}
        content |= {"args": None, "cfg": {"_name": None, "model": model, "task": task}}
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "checkpoint_best.pt"
    torch.save(content, path, _use_new_zipfile_serialization=form != "2018")
    for language, of_it in words.items():
        lines = "".join(f"{word} {100 - i}\n" for i, word in enumerate(of_it))
        (directory / f"dict.{language}.txt").write_text(lines)
    return Source(path, args, weights)


def _nested(args: Namespace) -> dict[str, Any]:
    """Return options as newer versions group them; one of them refers to another."""
    found: dict[str, Any] = {"_name": args.arch, "encoder": {}, "decoder": {}}
    for name, value in vars(args).items():
        side, _, inner = name.partition("_")
        if side in ("encoder", "decoder"):
            found[side][inner] = value
        elif name not in ("arch", "task", "source_lang", "target_lang"):
            found[name] = value
    found["decoder"]["output_dim"] = "${model.decoder.embed_dim}"
    return found


def _fairseq_weights(args: Namespace, num_source: int, num_target: int) -> dict[str, Tensor]:
    draw = Draw()
    for side, size in (("encoder", num_source), ("decoder", num_target)):
        draw.weights[f"{side}.version"] = torch.tensor([3.0])
        draw.table(f"{side}.embed_tokens.weight", size, WIDTH)
        if args.encoder_learned_pos:
            places = args.max_source_positions + 2
            draw.table(f"{side}.embed_positions.weight", places, WIDTH)
        else:
            draw.weights[f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
        if args.layernorm_embedding:
            draw.norm(f"{side}.layernorm_embedding")
        for i in range(LAYERS):
            at = f"{side}.layers.{i}"
            attentions = ["self_attn"] + ["encoder_attn"] * (side == "decoder")
            for name in attentions:
                for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
                    draw.linear(f"{at}.{name}.{part}", WIDTH, WIDTH)
                draw.norm(f"{at}.{name}_layer_norm")
            draw.linear(f"{at}.fc1", INNER, WIDTH)
            draw.linear(f"{at}.fc2", WIDTH, INNER)
            draw.norm(f"{at}.final_layer_norm")
        if args.encoder_normalize_before:
            draw.norm(f"{side}.layer_norm")
    if args.share_all_embeddings:
        draw.copy("decoder.embed_tokens.weight", "encoder.embed_tokens.weight")
    if args.share_all_embeddings or args.share_decoder_input_output_embed:
        draw.copy("decoder.output_projection.weight", "decoder.embed_tokens.weight")
    else:
        draw.table("decoder.output_projection.weight", num_target, WIDTH)
    return draw.weights


def _aged(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights as a file of 2018 names them, with projections packed."""
    kinds = {"self_attn_layer_norm": 0, "encoder_attn_layer_norm": 1, "final_layer_norm": 2}
    found: dict[str, Tensor] = {"encoder.embed_positions.weights": torch.zeros(0)}
    for name, tensor in weights.items():
        at, _, kind = name.rpartition(".")
        norm = at.rpartition(".")[2]
        if norm in kinds:
            number = min(kinds[norm], 1) if name.startswith("encoder") else kinds[norm]
            found[f"{at.removesuffix(norm)}layer_norms.{number}.{kind}"] = tensor
        elif norm == "q_proj":
            base = at.removesuffix("q_proj")
            parts = [weights[f"{base}{part}_proj.{kind}"] for part in "qkv"]
            found[f"{base}in_proj_{kind}"] = torch.cat(parts)
        elif name == "decoder.output_projection.weight":
            if tensor is not weights["decoder.embed_tokens.weight"]:
                found["decoder.embed_out"] = tensor
        elif norm not in ("k_proj", "v_proj") and "_float_tensor" not in name:
            found[name] = tensor
    return found


def save_opennmt(path: Path, *, version: int = 3, form: str = "pytorch", **options: Any) -> Source:
    """Save a model as a version of the toolkit does; `form` is pytorch or safetensors."""
    size = {"hidden_size": WIDTH} if version == 3 else {"rnn_size": WIDTH, "enc_rnn_size": WIDTH}
    opt = Namespace(**{**OPENNMT_OPTIONS, **size, **options})
    source, target = OPENNMT_SPECIAL + SOURCE_WORDS, OPENNMT_SPECIAL + TARGET_WORDS
    if opt.share_embeddings:
        target = source
    weights = _opennmt_weights(opt, len(source), len(target), has_biases=version < 3)
    model = {name: one for name, one in weights.items() if not name.startswith("generator")}
    model["encoder.embeddings.make_embedding.pe.pe"] = torch.zeros(5, 1, WIDTH)
    prefix = "" if version == 3 else "0."
    generator = {f"{prefix}{kind}": weights[f"generator.{kind}"] for kind in ("weight", "bias")}
    vocab: Any = {"src": source, "tgt": target, "data_task": "seq2seq"}
    with _old_classes():
        if version < 3:
            sides = (("src", source), ("tgt", target))
            vocab = {side: _field(side, words, version) for side, words in sides}
        content = {"vocab": vocab, "opt": opt, "optim": {"training_step": 3}}
        if form == "safetensors":
            unshared = {name: one.clone() for name, one in weights.items()}
            safetensors.torch.save_file(unshared, path.with_suffix(".safetensors"))
        else:
            content |= {"model": model, "generator": generator}
        torch.save(content, path)
    return Source(path, opt, weights)


def _opennmt_weights(
    opt: Namespace, num_source: int, num_target: int, *, has_biases: bool
) -> dict[str, Tensor]:
    draw = Draw()
    in_attention = getattr(opt, "add_qkvbias", has_biases)
    in_feed_forward = getattr(opt, "add_ffnbias", has_biases)
    in_norm = getattr(opt, "layer_norm", "standard") == "standard"
    stacks = {"encoder": (num_source, "transformer"), "decoder": (num_target, "transformer_layers")}
    for side, (size, stack) in stacks.items():
        draw.table(f"{side}.embeddings.make_embedding.emb_luts.0.weight", size, WIDTH)
        for i in range(LAYERS):
            at = f"{side}.{stack}.{i}"
            for name in ["self_attn"] + ["context_attn"] * (side == "decoder"):
                for part in ("linear_query", "linear_keys", "linear_values", "final_linear"):
                    draw.linear(f"{at}.{name}.{part}", WIDTH, WIDTH, bias=in_attention)
            gate = ["w_3"] * (opt.pos_ffn_activation_fn in ("silu", "gated-gelu"))
            for name in ["w_1", *gate]:
                draw.linear(f"{at}.feed_forward.{name}", INNER, WIDTH, bias=in_feed_forward)
            draw.linear(f"{at}.feed_forward.w_2", WIDTH, INNER, bias=in_feed_forward)
            norms = ["layer_norm"] if side == "encoder" else ["layer_norm_1", "layer_norm_2"]
            for name in [*norms, "feed_forward.layer_norm"]:
                draw.norm(f"{at}.{name}", bias=in_norm)
        draw.norm(f"{side}.layer_norm", bias=in_norm)
    lookup = "embeddings.make_embedding.emb_luts.0.weight"
    if opt.share_embeddings:
        draw.copy(f"decoder.{lookup}", f"encoder.{lookup}")
    draw.linear("generator", num_target, WIDTH)
    if opt.share_decoder_embeddings:
        draw.copy("generator.weight", f"decoder.{lookup}")
    return draw.weights


@contextmanager
def _old_classes() -> Iterator[None]:
    """Let objects be saved as torchtext and OpenNMT-py 2 had them; nobody can load them after."""
    classes = {
        "torchtext.data.field.Field": _Field,
        "torchtext.vocab.Vocab": _Vocab,
        "onmt.inputters.text_dataset.TextMultiField": _TextMultiField,
    }
    packages = ("torchtext", "torchtext.data", "onmt", "onmt.inputters")
    modules = {name: ModuleType(name) for name in packages}
    for path, kind in classes.items():
        kind.__module__, _, kind.__qualname__ = path.rpartition(".")
        modules[kind.__module__] = ModuleType(kind.__module__)
        setattr(modules[kind.__module__], kind.__qualname__, kind)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


class _Field:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


class _Vocab(_Field):
    pass


class _TextMultiField(_Field):
    pass


def _field(side: str, words: list[str], version: int) -> object:
    ids = defaultdict(int, {word: i for i, word in enumerate(words)})
    vocabulary = _Vocab(itos=words, stoi=ids, freqs=Counter(words), vectors=None)
    field = _Field(vocab=vocabulary, dtype=torch.int64, tokenize=partial(_Field, layer=None))
    return _TextMultiField(fields=[(side, field)]) if version == 2 else [(side, field)]
