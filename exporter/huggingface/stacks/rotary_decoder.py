"""Options that most decoders of today share: rotary positions, RMS norms, gated feed-forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from exporter.huggingface.conversion import NameTable, head_order, layers, modules
from exporter.huggingface.family import Options, Original, refused
from exporter.huggingface.stacks.decoder import DECODER, FIXED, decoder
from exporter.models.config import PositiveInt, RotaryScaling, TransformerConfig

LAYER_TYPES = ("full_attention", "sliding_attention")
ROTARY = {
    **DECODER,
    "d_ff": "intermediate_size",
    "feed_forward.activation": "hidden_act",
    "norm_eps": "rms_norm_eps",
    "attention.dropout": "attention_dropout",
}
ROTARY_FIXED = {
    **FIXED,
    "attention.bias": False,
    "feed_forward.gated": True,
    "feed_forward.bias": False,
    "norm": "rms",
    "positions.kind": "rotary",
}


class Rope(BaseModel):
    """One of the `rope_parameters` of a configuration; transformers reads the other fields."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    rope_type: Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope"]
    rope_theta: float
    partial_rotary_factor: float = 1.0
    factor: Annotated[float, Field(ge=1)] | None = None
    original_max_position_embeddings: PositiveInt | None = None

    def scaling(self, config: Any, length: int | None = None) -> RotaryScaling | None:
        """Return how all layers turn, or those without a window; None if the base says it.

        longrope turns texts of a `length` above its first otherwise. dynamic is as default up to
        the length of the model, which is the longest here.
        """
        if self.rope_type in ("default", "dynamic"):
            return None
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        layer_type = None if "rope_type" in config.rope_parameters else "full_attention"
        try:
            frequencies, factor = ROPE_INIT_FUNCTIONS[self.rope_type](
                config, None, length, layer_type=layer_type
            )
        except Exception as error:
            raise ValueError(f"its rope_parameters cannot be: {error}") from error
        first_len, is_longrope = self.original_max_position_embeddings, self.rope_type == "longrope"
        return RotaryScaling(
            frequencies=tuple(frequencies.tolist()),
            attention_factor=factor,
            original_max_len=None if is_longrope else first_len,
            least_len=1 + (first_len or 0) if is_longrope and length else 1,
        )


def rotary(original: Original, rope: Rope | None = None, *, turns_parts: bool = False) -> Options:
    """Return the sizes of heads, how positions turn, and how long a text may be.

    A part of a head may turn where it `turns_parts`, and the rest stays as it is.
    """
    config, rope = original.config, rope or rope_of(original)
    share = rope.partial_rotary_factor
    if share != 1 and not (turns_parts and 0 < share < 1):
        supported = "above 0, up to 1" if turns_parts else "1"
        raise ValueError(f"partial_rotary_factor is {share}; supported: {supported}")
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turned = int(width * share)
    head_dim = _unless_filled(original, "head_dim")
    longest, first_len = config.max_position_embeddings, _first_len(original, rope)
    is_long = _is_long(original, first_len)
    return {
        **decoder(original),
        "num_kv_heads": _unless_filled(original, "num_key_value_heads"),
        "key_dim": head_dim,
        "value_dim": head_dim,
        "max_target_len": longest if is_long else first_len,
        "positions.rotary_base": rope.rope_theta,
        "positions.rotary_scaling": rope.scaling(config, longest if is_long else None),
        "positions.rotary_dim": None if turned == width else turned,
    }


def windowed(original: Original, *, turns_parts: bool = False) -> Options:
    """Return likewise the options of a model that has a window, in the layers that it says.

    A window that no text outgrows is none.
    """
    found = rotary(original, turns_parts=turns_parts)
    window, types = original.config.sliding_window, getattr(original.config, "layer_types", None)
    if window is None or window >= found["max_target_len"]:
        return found
    layers = None if types is None else sliding(types)
    if layers == ():
        return found
    return {**found, "attention.window": window, "attention.windowed_layers": layers}


def _unless_filled(original: Original, name: str) -> int | None:
    """Return an option, None where transformers has filled in what follows from others."""
    value: int | None = getattr(original.config, name, None)
    usual = getattr(type(original.config), name, None)
    return usual if original.said.get(name) is None else value


def rope_of(original: Original) -> Rope:
    """Return how the positions of all layers turn."""
    return Rope.model_validate(original.config.rope_parameters)


def _first_len(original: Original, rope: Rope) -> int:
    """Return up to which length the places of a text turn as the model first learned them."""
    longest: int = original.config.max_position_embeddings
    if rope.rope_type != "longrope":
        return longest
    return min(longest, rope.original_max_position_embeddings or longest)


def _is_long(original: Original, first_len: int) -> bool:
    """Say whether all texts turn as those do that longrope finds long."""
    return original.asked_len is not None and original.asked_len > first_len


def length_notes(original: Original) -> list[str]:
    """Say where texts are shorter than the original allows, or turn otherwise."""
    first_len = _first_len(original, rope_of(original))
    longest = original.config.max_position_embeddings
    if first_len == longest:
        return []
    if _is_long(original, first_len):
        return [
            "all texts turn by the long_factor of rope_type longrope, where transformers takes "
            f"it for those of more than {first_len} tokens; import without --max-len, or with a "
            "smaller one, for its answers to shorter ones"
        ]
    return [
        f"texts may have {first_len} tokens, not {longest}: rope_type longrope turns all "
        f"positions otherwise as soon as a text is longer; --max-len above {first_len} imports it "
        "for long texts"
    ]


def local_options(original: Original, window: int) -> tuple[Rope, Options]:
    """Return how positions turn in layers that see all tokens, and the options of the others.

    Those see `window` tokens, and their positions turn in another way: nothing is stretched.
    """
    whole, local = (
        Rope.model_validate(original.config.rope_parameters[kind]) for kind in LAYER_TYPES
    )
    if local.rope_type != "default":
        name = "rope_parameters.sliding_attention.rope_type"
        raise ValueError(refused(name, local.rope_type, ("default",)))
    layers = sliding(original.config.layer_types)
    windows = {"attention.window": window, "attention.windowed_layers": layers}
    return whole, {**windows, "positions.local_rotary_base": local.rope_theta} if layers else {}


def sliding(layer_types: Sequence[str]) -> tuple[int, ...]:
    """Return which layers have a window."""
    for i, kind in enumerate(layer_types):
        if kind not in LAYER_TYPES:
            raise ValueError(refused(f"layer_types.{i}", kind, LAYER_TYPES))
    return tuple(i for i, kind in enumerate(layer_types) if kind == "sliding_attention")


def rotary_decoder_weights(config: TransformerConfig) -> NameTable:
    """Return where Llama has its weights, and most decoders after it."""
    return {
        **modules(
            {
                "decoder.embeddings.token": "model.embed_tokens",
                "decoder.output": "lm_head",
                "decoder.final_norm": "model.norm",
            }
        ),
        **layers(
            "decoder",
            "model.layers",
            query="self_attn.q_proj",
            key="self_attn.k_proj",
            value="self_attn.v_proj",
            query_norm="self_attn.q_norm",
            key_norm="self_attn.k_norm",
            output="self_attn.o_proj",
            attention_norm="input_layernorm",
            gate="mlp.gate_proj",
            up="mlp.up_proj",
            down="mlp.down_proj",
            feed_forward_norm="post_attention_layernorm",
        ),
    }


def turned_first(config: TransformerConfig, table: NameTable) -> NameTable:
    """Return a table by which the numbers of queries and keys that turn begin each half of a head.

    Theirs are the first of the head, whatever turns; the order changes no score.
    """
    width, turned = config.head_key_dim, config.turned_dim
    half, rest = turned // 2, (width - turned) // 2
    first = (*range(half), *range(turned, turned + rest))
    order = (*first, *range(half, turned), *range(turned + rest, width))
    changed = dict(table)
    for name, num_heads in (("q_proj", config.num_heads), ("k_proj", config.kv_heads)):
        for kind in ("weight", "bias"):
            ours = f"decoder.layers.{{i}}.self_attention.{name}.{kind}"
            steps = (*table[ours].steps, head_order(order, num_heads))
            changed[ours] = replace(table[ours], steps=steps)
    return changed
