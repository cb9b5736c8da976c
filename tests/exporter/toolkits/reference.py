"""The computation of OpenNMT-py and fairseq with their weights, in plain torch.

Written after their modules: `onmt.encoders.transformer`, `onmt.decoders.transformer`,
`onmt.modules.embeddings` and `position_ffn` of OpenNMT-py 2.3 and 3.5,
`fairseq.models.transformer` and `fairseq.modules` of fairseq 0.12.2. Their own modules gave the
same logits for such weights within 6e-6.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

Weights = Mapping[str, Tensor]
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_accurate": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "gated-gelu": F.gelu,
}


def fairseq_logits(w: Weights, args: Namespace, source: Tensor, target: Tensor) -> Tensor:
    """Return (B, T, V) of source (B, S) with padding 1, and target (B, T)."""
    first, act = args.encoder_normalize_before, ACTIVATIONS[args.activation_fn]

    def embed(side: str, ids: Tensor) -> Tensor:
        table = w[f"{side}.embed_tokens.weight"]
        scale = 1.0 if args.no_scale_embedding else math.sqrt(table.shape[1])
        hidden = scale * table[ids]
        places = torch.arange(ids.shape[1]) + 2
        learned = w.get(f"{side}.embed_positions.weight")
        hidden = hidden + (concat_waves(table.shape[1]) if learned is None else learned)[places]
        return (
            norm(w, f"{side}.layernorm_embedding", hidden) if args.layernorm_embedding else hidden
        )

    def sublayer(name: str, hidden: Tensor, run: Callable[[Tensor], Tensor]) -> Tensor:
        if first:
            return hidden + run(norm(w, name, hidden))
        return norm(w, name, hidden + run(hidden))

    def layer(at: str, hidden: Tensor, mask: Tensor, memory: Tensor | None) -> Tensor:
        names = ("q_proj", "k_proj", "v_proj", "out_proj")
        heads = args.encoder_attention_heads
        hidden = sublayer(
            f"{at}.self_attn_layer_norm",
            hidden,
            lambda x: attend(w, f"{at}.self_attn", names, x, x, mask, heads),
        )
        if memory is not None:
            hidden = sublayer(
                f"{at}.encoder_attn_layer_norm",
                hidden,
                lambda x: attend(w, f"{at}.encoder_attn", names, x, memory, seen, heads),
            )
        return sublayer(
            f"{at}.final_layer_norm",
            hidden,
            lambda x: linear(w, f"{at}.fc2", act(linear(w, f"{at}.fc1", x))),
        )

    seen = (source != 1)[:, None, None, :]
    memory = embed("encoder", source)
    for i in range(args.encoder_layers):
        memory = layer(f"encoder.layers.{i}", memory, seen, None)
    memory = norm(w, "encoder.layer_norm", memory) if first else memory
    hidden = embed("decoder", target)
    for i in range(args.decoder_layers):
        hidden = layer(f"decoder.layers.{i}", hidden, before(target), memory)
    hidden = norm(w, "decoder.layer_norm", hidden) if first else hidden
    return linear(w, "decoder.output_projection", hidden)


def opennmt_logits(
    w: Weights, opt: Namespace, source: Tensor, target: Tensor, lengths: Tensor
) -> Tensor:
    """Return (B, T, V) of sources (B, S) of these lengths, and target (B, T)."""
    is_rms = getattr(opt, "layer_norm", "standard") == "rms"
    kind = getattr(opt, "position_encoding_type", "SinusoidalInterleaved")
    names = ("linear_query", "linear_keys", "linear_values", "final_linear")

    def normed(name: str, hidden: Tensor) -> Tensor:
        if not is_rms:
            return norm(w, name, hidden, 1e-6)
        scale = torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-6)
        return hidden * scale * w[f"{name}.weight"]

    def embed(side: str, ids: Tensor) -> Tensor:
        table = w[f"{side}.embeddings.make_embedding.emb_luts.0.weight"]
        width = table.shape[1]
        waves = concat_waves(width) if kind == "SinusoidalConcat" else turned_waves(width)
        return table[ids] * math.sqrt(width) + waves[: ids.shape[1]]

    def feed_forward(at: str, hidden: Tensor) -> Tensor:
        inner = normed(f"{at}.layer_norm", hidden)
        up = ACTIVATIONS[opt.pos_ffn_activation_fn](linear(w, f"{at}.w_1", inner))
        if f"{at}.w_3.weight" in w:
            up = up * linear(w, f"{at}.w_3", inner)
        return hidden + linear(w, f"{at}.w_2", up)

    seen = (torch.arange(source.shape[1]) < lengths[:, None])[:, None, None, :]
    memory = embed("encoder", source)
    for i in range(opt.enc_layers):
        at = f"encoder.transformer.{i}"
        inner = normed(f"{at}.layer_norm", memory)
        memory = memory + attend(w, f"{at}.self_attn", names, inner, inner, seen, opt.heads)
        memory = feed_forward(f"{at}.feed_forward", memory)
    memory = normed("encoder.layer_norm", memory)
    hidden = embed("decoder", target)
    for i in range(opt.dec_layers):
        at = f"decoder.transformer_layers.{i}"
        inner, mask = normed(f"{at}.layer_norm_1", hidden), before(target)
        hidden = hidden + attend(w, f"{at}.self_attn", names, inner, inner, mask, opt.heads)
        inner = normed(f"{at}.layer_norm_2", hidden)
        hidden = hidden + attend(w, f"{at}.context_attn", names, inner, memory, seen, opt.heads)
        hidden = feed_forward(f"{at}.feed_forward", hidden)
    return linear(w, "generator", normed("decoder.layer_norm", hidden))


def linear(w: Weights, name: str, hidden: Tensor) -> Tensor:
    return F.linear(hidden, w[f"{name}.weight"], w.get(f"{name}.bias"))


def norm(w: Weights, name: str, hidden: Tensor, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(hidden, hidden.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)


def attend(
    w: Weights,
    at: str,
    names: tuple[str, str, str, str],
    query: Tensor,
    memory: Tensor,
    mask: Tensor,
    heads: int,
) -> Tensor:
    q, k, v = (
        linear(w, f"{at}.{name}", x).unflatten(-1, (heads, -1)).transpose(1, 2)
        for name, x in zip(names, (query, memory, memory), strict=False)
    )
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    mixed = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v
    return linear(w, f"{at}.{names[3]}", mixed.transpose(1, 2).flatten(2))


def before(target: Tensor) -> Tensor:
    length = target.shape[1]
    return torch.ones(length, length, dtype=torch.bool).tril()


def concat_waves(width: int) -> Tensor:
    """Return sines, then cosines, as in tensor2tensor."""
    half = width // 2
    rates = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(64).float()[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], 1)


def turned_waves(width: int) -> Tensor:
    """Return sines and cosines in turn, as in the paper."""
    rates = torch.exp(torch.arange(0, width, 2).float() * -(math.log(10000.0) / width))
    angles = torch.arange(64).float()[:, None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
