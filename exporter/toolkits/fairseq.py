"""fairseq's Transformers for translation: options, names of weights of all ages, dictionaries."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from torch import Tensor

from engine.errors import CheckpointError
from engine.requests.generation_defaults import GenerationDefaults
from engine.wording import listed, shortened
from exporter.huggingface.conversion import NameTable, modules
from exporter.huggingface.family import Family, Options, Original, SpecialTokens
from exporter.huggingface.stacks.bart_like import COMPUTED_POSITIONS, bart_like_weights
from exporter.models.config import PositiveInt, Probability, TransformerConfig
from exporter.toolkits.original import OPTIONS_NAME, ToolkitModel, ToolkitOptions
from exporter.toolkits.torch_file import plain, tensors_of
from exporter.toolkits.words import Words, read_dictionary

ARCHITECTURES = (
    "transformer",
    "transformer_tiny",
    "transformer_iwslt_de_en",
    "transformer_wmt_en_de",
    "transformer_vaswani_wmt_en_de_big",
    "transformer_vaswani_wmt_en_fr_big",
    "transformer_wmt_en_de_big",
    "transformer_wmt_en_de_big_t2t",
)
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")  # every dictionary begins with them
_PAD, _END = 1, 2
_OFFSET = _PAD + 1  # the first place has this number
_ACTIVATIONS: Mapping[str, Literal["relu", "gelu", "gelu_tanh"]] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
}
# Tensors that say nothing: marks, and copies that no computation reads.
_IGNORED = (
    rf"{COMPUTED_POSITIONS}|.*\.embed_positions\._float_tensor|(en|de)coder\.version"
    r"|encoder\.layers\.\d+\.(in_proj|out_proj|fc1|fc2)_(weight|bias)"
)
Off = Annotated[Literal[None, False, 0], Field(default=None)]


class FairseqConfig(ToolkitOptions):
    """The options of a model, with the defaults of the architecture `transformer`."""

    arch: Literal[ARCHITECTURES]  # type: ignore[valid-type]
    task: Literal["translation"] = "translation"
    source_size: PositiveInt
    target_size: PositiveInt
    encoder_version: float  # the form in which weights are saved
    decoder_version: float
    encoder_embed_dim: PositiveInt = 512
    decoder_embed_dim: PositiveInt = 512
    decoder_input_dim: PositiveInt | None = None
    decoder_output_dim: PositiveInt | None = None
    encoder_ffn_embed_dim: PositiveInt = 2048
    decoder_ffn_embed_dim: PositiveInt = 2048
    encoder_layers: PositiveInt = 6
    decoder_layers: PositiveInt = 6
    encoder_attention_heads: PositiveInt = 8
    decoder_attention_heads: PositiveInt = 8
    encoder_normalize_before: bool = False
    decoder_normalize_before: bool = False
    no_decoder_final_norm: bool = False
    encoder_learned_pos: bool = False
    decoder_learned_pos: bool = False
    layernorm_embedding: bool = False
    no_scale_embedding: bool = False
    share_all_embeddings: bool = False
    share_decoder_input_output_embed: bool = False
    activation_fn: Literal["relu", "gelu", "gelu_fast", "gelu_accurate"] = "relu"
    max_source_positions: PositiveInt = 1024
    max_target_positions: PositiveInt = 1024
    dropout: Probability = 0.1
    attention_dropout: Probability = 0.0
    activation_dropout: Probability = 0.0
    no_token_positional_embeddings: Off
    adaptive_softmax_cutoff: Off
    adaptive_input: Off
    no_cross_attention: Off
    cross_self_attention: Off
    char_inputs: Off
    base_layers: Off
    encoder_layers_to_keep: Off
    decoder_layers_to_keep: Off
    scale_attn: Off
    scale_heads: Off
    scale_fc: Off
    scale_resids: Off

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = ("embed_dim", "ffn_embed_dim", "attention_heads", "normalize_before", "learned_pos")
        problems = []
        for name in names:
            given, other = getattr(self, f"encoder_{name}"), getattr(self, f"decoder_{name}")
            if given != other:
                problems.append(
                    f"encoder_{name} is {given} and decoder_{name} {other}; supported: equal"
                )
        for name in ("decoder_input_dim", "decoder_output_dim"):
            if getattr(self, name) not in (None, self.decoder_embed_dim):
                problems.append(
                    f"{name} is {getattr(self, name)}; supported: decoder_embed_dim "
                    f"({self.decoder_embed_dim})"
                )
        if self.final_norm is None and self.encoder_normalize_before:
            problems.append("one of encoder and decoder has a final norm; supported: both, neither")
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @property
    def final_norm(self) -> bool | None:
        """Whether both sides have a norm behind their last layer; None: one of them."""
        in_encoder = self.encoder_normalize_before and self.encoder_version >= 2
        in_decoder = self.decoder_normalize_before and self.decoder_version > 2
        in_decoder = in_decoder and not self.no_decoder_final_norm
        return in_encoder if in_encoder == in_decoder else None


def _computed(original: Original) -> Options:
    given, tokens = FairseqConfig.model_validate(original.config), original.tokens
    is_other = given.source_size != given.target_size
    return {
        "d_model": given.encoder_embed_dim,
        "num_heads": given.encoder_attention_heads,
        "d_ff": given.encoder_ffn_embed_dim,
        "num_encoder_layers": given.encoder_layers,
        "num_decoder_layers": given.decoder_layers,
        "feed_forward.activation": _ACTIVATIONS[given.activation_fn],
        "norm_position": "first" if given.encoder_normalize_before else "last",
        "final_norm": given.final_norm,
        "embedding_norm": given.layernorm_embedding,
        "positions.kind": "learned" if given.encoder_learned_pos else "sinusoidal_tensor2tensor",
        "positions.offset": 0 if given.encoder_learned_pos else _OFFSET,
        "dropout": given.dropout,
        "attention.dropout": given.attention_dropout,
        "feed_forward.dropout": given.activation_dropout,
        "vocab_size": given.target_size,
        "source_vocab_size": given.source_size if is_other else None,
        "max_source_len": given.max_source_positions,
        "max_target_len": given.max_target_positions,
        "scale_embeddings": not given.no_scale_embedding,
        "share_embeddings": given.share_all_embeddings,
        "tie_output": given.share_all_embeddings or given.share_decoder_input_output_embed,
        "pad_token_id": tokens.pad or 0,
        "bos_token_id": tokens.decoder_start,
        "eos_token_id": tokens.eos,
    }


def _weights(config: TransformerConfig) -> NameTable:
    return {
        **bart_like_weights(config, _OFFSET),
        **modules({"decoder.output": "decoder.output_projection"}),
    }


FAIRSEQ = Family(
    title="fairseq",
    model_types=ARCHITECTURES,
    fixed={"architecture": "encoder-decoder"},
    computed=_computed,
    weights=_weights,
    body="model.",
    ignored=_IGNORED,
    options_name=OPTIONS_NAME,
)


def is_fairseq(content: Mapping[str, Any]) -> bool:
    """Say whether a file is a checkpoint of fairseq."""
    return "model" in content and ("args" in content or "cfg" in content)


def read_fairseq(path: Path, content: Mapping[str, Any]) -> ToolkitModel:
    """Return the model in a file; its dictionaries lie beside it. CheckpointError as of them."""
    options, task = _options(content)
    weights = _upgraded(tensors_of(content, "model", path))
    source_words, target_words = (
        Words(read_dictionary(one, SPECIAL), "<unk>", SPECIAL, "</s>")
        for one in _dictionaries(path.parent, task)
    )
    found = {
        "source_size": len(source_words),
        "target_size": len(target_words),
        "encoder_version": _version(weights, "encoder"),
        "decoder_version": _version(weights, "decoder"),
        "task": _name_of(task, "translation"),
    }
    return ToolkitModel(
        FAIRSEQ,
        str(options.get("arch")),
        {**options, **found},
        weights,
        source_words,
        target_words,
        SpecialTokens(eos=_END, pad=_PAD, decoder_start=_END),
        # It writes no padding and no empty answer, and ends when as many have ended as beams.
        GenerationDefaults(
            banned_tokens=(_PAD,), min_new_tokens=1, length_penalty=1.0, beam_end="enough"
        ),
    )


def _options(content: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of the model and of its task, from either form of a file."""
    parts = _dictionary(content.get("args") or content.get("cfg"))
    model, task = parts, parts
    if isinstance(parts.get("model"), dict):
        model, task = parts["model"], _dictionary(parts.get("task"))
    flat = {"arch": _name_of(model, None)}
    for name, value in model.items():
        if name in ("encoder", "decoder") and isinstance(value, dict):
            flat |= {f"{name}_{inner}": one for inner, one in value.items()}
        else:
            flat[name] = value
    given = {name: value for name, value in flat.items() if value is not None}
    if "max_positions" in given:  # files of 2018 have one for both sides
        both = {f"max_{side}_positions": given["max_positions"] for side in ("source", "target")}
        given = {**both, **given}
    if not given.get("activation_dropout") and given.get("relu_dropout"):
        given["activation_dropout"] = given["relu_dropout"]
    return given, task


def _dictionary(value: object) -> dict[str, Any]:
    found = plain(value)
    return found if isinstance(found, dict) else {}


def _name_of(options: Mapping[str, Any], default: str | None) -> Any:
    """Return what a model is (`arch`), or a task (`task`); newer options have it as `_name`."""
    for name in ("arch", "_name") if default is None else ("_name", "task"):
        if isinstance(options.get(name), str):
            return options[name]
    return default


def _version(weights: Mapping[str, Tensor], side: str) -> float:
    version = weights.get(f"{side}.version")
    return float(version.flatten()[0]) if version is not None and version.numel() else 1.0


def _dictionaries(directory: Path, task: Mapping[str, Any]) -> tuple[Path, Path]:
    """Return the dictionaries of sources and of targets, by the languages of the task."""
    languages = [task.get(name) for name in ("source_lang", "target_lang")]
    wanted = [directory / f"dict.{shortened(str(one))}.txt" for one in languages]
    if missing := [path.name for path in wanted if not path.is_file()]:
        there = sorted(path.name for path in directory.glob("dict*.txt"))
        raise CheckpointError(
            f"{directory} has no {listed(missing)}, and has {listed(there) or 'none'}; copy the "
            "dictionaries there that `fairseq-preprocess` wrote beside the data"
        )
    return wanted[0], wanted[1]


def _upgraded(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights by the names of today; what was packed is not copied."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        packed = re.fullmatch(r"(.*_attn\.)in_proj_(weight|bias)", name)
        norm = re.fullmatch(r"((en|de)coder\.layers\.\d+\.)layer_norms\.(\d)(\..*)", name)
        if packed is not None and tensor.ndim and len(tensor) % 3 == 0:
            for part, one in zip("qkv", tensor.chunk(3), strict=True):
                found[f"{packed[1]}{part}_proj.{packed[2]}"] = one
            continue
        if name == "decoder.embed_out":
            name = "decoder.output_projection.weight"
        elif norm is not None:
            kinds = ["self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"]
            if norm[2] == "en":
                del kinds[1]
            if int(norm[3]) < len(kinds):
                name = f"{norm[1]}{kinds[int(norm[3])]}{norm[4]}"
        found[name] = tensor
    return found
