"""A causal model of transformers, computed by its own code, behind our attention.

transformers takes an attention function by name, and hands it whatever its model was called with:
here the caches of all layers. Without caches a model attends as its own code does, so that what a
certificate compares the graph with is the original itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from engine.errors import CheckpointError
from engine.wording import shortened
from exporter.models.cache import LayerCache
from exporter.models.config import OriginalCode, TransformerConfig
from exporter.models.own import OwnDecoder
from exporter.operators.heads import merge_heads

_ATTENTION = "tokenweir"  # the name of ours in transformers
_PLACES = {"position_ids", "cache_position"}  # tensors that change nothing behind rotary positions


class _Output:
    """The output of a body for its head: hidden states, and nothing of what else there may be."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _Body(nn.Module):
    """All of a model below its head, which is called with hidden states alone, too."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, *args: Any, finished: Tensor | None = None, **options: Any) -> Any:
        return self.body(*args, **options) if finished is None else _Output(finished)


class TransformersModel(nn.Module):
    """A model that writes, with the methods that `GPT` has."""

    def __init__(self, config: TransformerConfig, original: Any = None) -> None:
        """Dress a model of transformers; without one it is built, with weights of its own."""
        super().__init__()
        assert config.code is not None, "it is what the model is built from"
        self.config = config
        self.decoder = _Decoder(original or build_original(config.code), config)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the logits (B, T, vocab_size) of the token after each of int64 ids (B, T)."""
        return self.decoder.logits(self.decoder.hidden_states(input_ids))

    def encode(self, source_ids: Tensor, source_mask: Tensor | None = None) -> None:
        """Return None: a model without encoder has no source."""

    def to(self, *args: Any, **options: Any) -> TransformersModel:
        """Change weights only, as transformers does: frequencies of positions stay as they are."""
        computed = dict(self.named_buffers())
        super().to(*args, **options)
        for name, buffer in computed.items():
            owner, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(owner), attribute, buffer)
        return self


class _Decoder(OwnDecoder):
    def __init__(self, model: Any, config: TransformerConfig) -> None:
        setattr(model, model.base_model_prefix, _Body(model.base_model))
        super().__init__(model, config)

    def hidden_states(
        self,
        input_ids: Tensor,
        memory: Tensor | None = None,
        source_mask: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        caches: Sequence[LayerCache] | None = None,
    ) -> Tensor:
        model: Any = self.model
        model.set_attn_implementation("eager" if caches is None else _ATTENTION)
        given = {} if caches is None else {"position_ids": position_ids, "caches": caches}
        found: Tensor = model.base_model(input_ids=input_ids, use_cache=False, **given)[0]
        return found

    def logits(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(1, -1, hidden.shape[-1])
        logits: Tensor = self.model(inputs_embeds=rows, finished=rows, use_cache=False).logits
        return logits.view(*hidden.shape[:-1], -1)


def build_original(code: OriginalCode) -> Any:
    """Return a model of its own class, in eval mode.

    Raises CheckpointError where another major version of transformers is installed, or none, and
    for what it does not build.
    """
    installed = version("transformers") if find_spec("transformers") else "none"
    major = code.version.partition(".")[0]
    if installed.partition(".")[0] != major:
        raise CheckpointError(
            f"the model is computed by the code of transformers {code.version}, and installed is "
            f"{installed}: pip install 'transformers>={major},<{int(major) + 1}'"
        )
    import transformers
    from transformers.initialization import no_init_weights

    transformers.AttentionInterface.register(_ATTENTION, _attend)
    try:
        config = transformers.CONFIG_MAPPING[code.config["model_type"]].from_dict({**code.config})
        with no_init_weights():  # a file has them all, and some draws end only where they are drawn
            model = transformers.AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
            )
        model.tie_weights()
        return model.eval()
    except Exception as error:
        said = shortened(" ".join(str(error).split()))
        raise CheckpointError(f"transformers does not build the model: {said}") from error


def attention_options(model: Any) -> dict[str, Any]:
    """Return the options that say how all layers of a model of transformers attend.

    ValueError says what our attention, or the engine's cache, does not have.
    """
    seen = _Seen()
    model.set_attn_implementation(_ATTENTION)
    ids = torch.zeros(1, 2, dtype=torch.long)
    with torch.no_grad():
        model.base_model(input_ids=ids, use_cache=False, caches=seen)
    model.set_attn_implementation("eager")
    layers = [options for _, options in sorted(seen.layers.items())]
    if [*sorted(seen.layers)] != [*range(model.config.num_hidden_layers)]:
        raise ValueError(f"{len(layers)} of {model.config.num_hidden_layers} layers attend")
    alike = [{**one, "attention.window": None} for one in layers]
    if any(one != alike[0] for one in alike):
        raise ValueError("its layers have heads of different numbers, widths or scores")
    windows = [one["attention.window"] for one in layers]
    windowed = tuple(i for i, window in enumerate(windows) if window)
    return {
        **alike[0],
        "num_decoder_layers": len(layers),
        "d_model": alike[0]["num_heads"] * alike[0]["key_dim"],
        "attention.window": min(filter(None, windows), default=None),
        "attention.windowed_layers": windowed or None,
    }


class _Seen:
    """Caches that keep how layers attend, and nothing else."""

    def __init__(self) -> None:
        self.layers: dict[int, dict[str, Any]] = {}
        self._layer = 0

    def __getitem__(self, layer: int) -> _Seen:
        self._layer = layer
        return self

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Do as `LayerCache.attend`, but for what is returned: zeros."""
        if self._layer in self.layers:
            raise ValueError(f"layer {self._layer} attends twice")
        num_heads, num_kv_heads = options["num_heads"], options["num_kv_heads"]
        self.layers[self._layer] = {
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "key_dim": query.shape[-1] // num_heads,
            "value_dim": options["value_dim"],
            "attention.scale": options["scale"],
            "attention.softcap": options["softcap"],
            "attention.window": options["window"],
        }
        return query.new_zeros(*query.shape[:2], num_heads * options["value_dim"])


def _attend(
    module: Any,
    query: Tensor,  # (B, num_heads, T, D)
    key: Tensor,  # (B, num_kv_heads, T, D)
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    caches: Any = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers asks, from new positions to those in a layer's cache."""
    others["attention_mask"] = attention_mask  # there is one only where a layer makes its own
    lacking = [name for name, one in others.items() if torch.is_tensor(one) and name not in _PLACES]
    if lacking:
        raise ValueError(f"its attention has {lacking[0]}, which ours has not")
    if caches is None:
        raise ValueError("its layers do not hand on what it is called with")
    if not others.get("is_causal", getattr(module, "is_causal", True)):
        raise ValueError("its attention is not causal")
    output = caches[module.layer_idx].attend(
        merge_heads(query),
        merge_heads(key),
        merge_heads(value),
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        value_dim=value.shape[-1],
        scale=query.shape[-1] ** -0.5 if scaling is None else float(scaling),
        softcap=softcap,
        window=sliding_window,
    )
    return output.unflatten(-1, (query.shape[1], -1)), None
