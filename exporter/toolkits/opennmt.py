"""OpenNMT-py's Transformers for translation, of its versions 1 to 3."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import safetensors.torch
from pydantic import Field, model_validator
from torch import Tensor

from engine.errors import CheckpointError
from engine.requests.generation_defaults import GenerationDefaults
from engine.wording import listed
from exporter.checkpoint import reading_weights
from exporter.huggingface.conversion import NameTable, modules
from exporter.huggingface.family import Family, Options, Original, SpecialTokens
from exporter.models.config import PositiveFloat, PositiveInt, TransformerConfig
from exporter.toolkits.original import OPTIONS_NAME, ToolkitModel, ToolkitOptions
from exporter.toolkits.torch_file import plain, tensors_of
from exporter.toolkits.words import Words, read_vocabulary

_UNKNOWN, _PAD, _BEGIN, _END = "<unk>", "<blank>", "<s>", "</s>"
_MAX_LEN = 5000  # the toolkit's, whatever a model was trained on
_USUAL_LEN = 512
_GATED = ("silu", "gated-gelu")
_ACTIVATIONS: Mapping[str, Literal["relu", "gelu", "silu"]] = {
    "relu": "relu",
    "gelu": "gelu",
    "silu": "silu",
    "gated-gelu": "gelu",
}
_POSITIONS: Mapping[str, Literal["sinusoidal", "sinusoidal_tensor2tensor"]] = {
    "SinusoidalInterleaved": "sinusoidal",
    "SinusoidalConcat": "sinusoidal_tensor2tensor",
}
_EMBEDDINGS = "embeddings.make_embedding.emb_luts.0"
Off = Annotated[Literal[None, False, 0], Field(default=None)]
Size = Annotated[int, Field(default=-1)]  # not above 0: another option says it


class OpenNmtConfig(ToolkitOptions):
    """The options of a model, `opt`, with the defaults of the toolkit."""

    source_size: PositiveInt
    target_size: PositiveInt
    encoder_type: Literal["transformer"]
    decoder_type: Literal["transformer"]
    model_type: Literal["text"] = "text"
    model_task: Literal["seq2seq"] = "seq2seq"
    position_encoding: Literal[True]
    position_encoding_type: Literal["SinusoidalInterleaved", "SinusoidalConcat"] = (
        "SinusoidalInterleaved"
    )
    layers: Size
    enc_layers: PositiveInt = 2
    dec_layers: PositiveInt = 2
    hidden_size: Size
    enc_hid_size: Size
    dec_hid_size: Size
    word_vec_size: Size
    src_word_vec_size: Size
    tgt_word_vec_size: Size
    heads: PositiveInt = 8
    transformer_ff: PositiveInt = 2048
    pos_ffn_activation_fn: Literal["relu", "gelu", "silu", "gated-gelu"] = "relu"
    layer_norm: Literal["standard", "rms"] = "standard"
    norm_eps: PositiveFloat = 1e-6
    add_qkvbias: bool
    add_ffnbias: bool
    share_embeddings: bool = False
    share_decoder_embeddings: bool = False
    generator_function: Literal["softmax"] = "softmax"
    self_attn_type: Literal["scaled-dot", "scaled-dot-flash"] = "scaled-dot"
    max_relative_positions: Off
    relative_positions_buckets: Off
    copy_attn: Off
    num_kv: Off
    multiquery: Off
    parallel_residual: Off
    sliding_window: Off
    num_experts: Off
    n_src_feats: Off
    lora_layers: tuple[()] | None = None
    lora_embedding: Off
    quant_layers: tuple[()] | None = None

    @property
    def width(self) -> int:
        """Numbers of a token between layers."""
        return next((size for size in (self.hidden_size, self.enc_hid_size) if size > 0), 500)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = ["src_word_vec_size", "tgt_word_vec_size", "dec_hid_size"]
        names = ["word_vec_size", *names[2:]] if self.word_vec_size > 0 else names
        problems = [
            f"{name} is {getattr(self, name)}; supported: that of the encoder ({self.width})"
            for name in names
            if 0 < getattr(self, name) != self.width
        ]
        if problems:
            raise ValueError("; ".join(problems))
        return self


def _computed(original: Original) -> Options:
    given, tokens = OpenNmtConfig.model_validate(original.config), original.tokens
    is_other = given.source_size != given.target_size
    each = given.layers if given.layers > 0 else None
    return {
        "d_model": given.width,
        "num_heads": given.heads,
        "d_ff": given.transformer_ff,
        "num_encoder_layers": each or given.enc_layers,
        "num_decoder_layers": each or given.dec_layers,
        "feed_forward.activation": _ACTIVATIONS[given.pos_ffn_activation_fn],
        "feed_forward.gated": given.pos_ffn_activation_fn in _GATED,
        "feed_forward.bias": given.add_ffnbias,
        "attention.bias": given.add_qkvbias,
        "norm": "layer" if given.layer_norm == "standard" else "rms",
        "norm_position": "first",
        "norm_eps": given.norm_eps,
        "positions.kind": _POSITIONS[given.position_encoding_type],
        "vocab_size": given.target_size,
        "source_vocab_size": given.source_size if is_other else None,
        "max_source_len": _MAX_LEN,
        "max_target_len": _MAX_LEN,
        "share_embeddings": given.share_embeddings,
        "tie_output": given.share_decoder_embeddings,
        "output_bias": True,
        "pad_token_id": tokens.pad or 0,
        "bos_token_id": tokens.decoder_start,
        "eos_token_id": tokens.eos,
    }


def _weights(config: TransformerConfig) -> NameTable:
    encoder, decoder = "encoder.transformer.{i}", "decoder.transformer_layers.{i}"
    norms = {
        "encoder.layers.{i}.self_attention_residual": f"{encoder}.layer_norm",
        "encoder.layers.{i}.feed_forward_residual": f"{encoder}.feed_forward.layer_norm",
        "decoder.layers.{i}.self_attention_residual": f"{decoder}.layer_norm_1",
        "decoder.layers.{i}.cross_attention_residual": f"{decoder}.layer_norm_2",
        "decoder.layers.{i}.feed_forward_residual": f"{decoder}.feed_forward.layer_norm",
    }
    return {
        **modules({f"{ours}.norm": theirs for ours, theirs in norms.items()}),
        **modules({f"{side}.final_norm": f"{side}.layer_norm" for side in ("encoder", "decoder")}),
        **_attention("encoder.layers.{i}.self_attention", f"{encoder}.self_attn"),
        **_attention("decoder.layers.{i}.self_attention", f"{decoder}.self_attn"),
        **_attention("decoder.layers.{i}.cross_attention", f"{decoder}.context_attn"),
        **_feed_forward("encoder.layers.{i}", encoder, config),
        **_feed_forward("decoder.layers.{i}", decoder, config),
        **modules(
            {
                "source_embeddings.token": f"encoder.{_EMBEDDINGS}",
                "decoder.embeddings.token": f"decoder.{_EMBEDDINGS}",
                "decoder.output": "generator",
            }
        ),
    }


def _attention(ours: str, theirs: str) -> NameTable:
    names = {
        "q_proj": "linear_query",
        "k_proj": "linear_keys",
        "v_proj": "linear_values",
        "out_proj": "final_linear",
    }
    return modules({f"{ours}.{one}": f"{theirs}.{other}" for one, other in names.items()})


def _feed_forward(ours: str, theirs: str, config: TransformerConfig) -> NameTable:
    names = {"up_proj": "w_1", "down_proj": "w_2"}
    if config.feed_forward.gated:
        names = {"gate_proj": "w_1", "up_proj": "w_3", "down_proj": "w_2"}
    renamed = {
        f"{ours}.feed_forward.{one}": f"{theirs}.feed_forward.{other}"
        for one, other in names.items()
    }
    return modules(renamed)


OPEN_NMT = Family(
    title="OpenNMT-py 1 to 3",
    model_types=("transformer",),
    fixed={"architecture": "encoder-decoder"},
    computed=_computed,
    notes=lambda _: [
        f"texts have up to {_USUAL_LEN} tokens, or what --max-len says: up to {_MAX_LEN:,}"
    ],
    weights=_weights,
    ignored=r".*\.make_embedding\.pe\.pe",
    options_name=OPTIONS_NAME,
)


def is_opennmt(content: Mapping[str, Any]) -> bool:
    """Say whether a file is a checkpoint of OpenNMT-py."""
    return "opt" in content and "vocab" in content


def read_opennmt(path: Path, content: Mapping[str, Any]) -> ToolkitModel:
    """Return the model in a file; CheckpointError if it has no weights, or vocabularies."""
    options = plain(content["opt"])
    options = options if isinstance(options, dict) else {}
    weights = _upgraded(content, path)
    vocabulary = content["vocab"]
    found = []
    for side in ("src", "tgt"):
        words = read_vocabulary(vocabulary, side, path)
        if _UNKNOWN not in words:
            raise CheckpointError(f"{path}: its words of {side} have no {_UNKNOWN}")
        special = tuple(word for word in (_UNKNOWN, _PAD, _BEGIN, _END) if word in words)
        found.append(Words(words, _UNKNOWN, special))
    source_words, target_words = found
    ids = target_words.ids
    begin = _BEGIN
    if isinstance(vocabulary, dict):
        begin = str(vocabulary.get("decoder_start_token", _BEGIN))
    if missing := [word for word in (begin, _END) if word not in ids]:
        raise CheckpointError(
            f"{path}: its vocabulary of targets lacks {listed(missing)}, which begins and ends "
            "what is written; give a checkpoint for translation"
        )
    return ToolkitModel(
        OPEN_NMT,
        "OpenNMT-py transformer",
        _with_defaults(options, weights, source_words, target_words, vocabulary),
        weights,
        source_words,
        target_words,
        SpecialTokens(eos=ids[_END], pad=ids.get(_PAD), decoder_start=ids[begin]),
        GenerationDefaults(length_penalty=1.0),
        usual_len=_USUAL_LEN,
    )


def _with_defaults(
    options: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    source_words: Words,
    target_words: Words,
    vocabulary: object,
) -> dict[str, Any]:
    """Return options with those that older files lack: older names, and what the weights show."""
    older = {"hidden_size": "rnn_size", "enc_hid_size": "enc_rnn_size"}
    older["dec_hid_size"] = "dec_rnn_size"
    found = {
        "source_size": len(source_words),
        "target_size": len(target_words),
        "add_qkvbias": "encoder.transformer.0.self_attn.linear_query.bias" in weights,
        "add_ffnbias": "encoder.transformer.0.feed_forward.w_1.bias" in weights,
    }
    found |= {new: options[old] for new, old in older.items() if options.get(old) is not None}
    if isinstance(vocabulary, dict) and vocabulary.get("src_feats"):
        found["n_src_feats"] = len(vocabulary["src_feats"])
    given = {name: value for name, value in options.items() if value is not None}
    biases = {name: found[name] for name in ("add_qkvbias", "add_ffnbias") if found[name]}
    return {**found, **given, **biases}


def _upgraded(content: Mapping[str, Any], path: Path) -> dict[str, Tensor]:
    """Return all weights by the names of today, with `save_format: safetensors` from their file."""
    if "model" not in content:
        beside = path.with_suffix(".safetensors")
        if not beside.is_file():
            raise CheckpointError(
                f"{path} has no model, and there is no {beside.name} beside it; copy it there too"
            )
        with reading_weights(beside):
            return safetensors.torch.load_file(beside)
    model, generator = (tensors_of(content, key, path) for key in ("model", "generator"))
    found: dict[str, Tensor] = {}
    for name, tensor in model.items():
        name = re.sub(r"(layer_norm(?:_\d+)?)\.a_2$", r"\1.weight", name)
        found[re.sub(r"(layer_norm(?:_\d+)?)\.b_2$", r"\1.bias", name)] = tensor
    for name, tensor in generator.items():
        found[f"generator.{name.removeprefix('0.')}"] = tensor
    return found
