"""Runs a model of a person's own class once, so that what it does wrong is said in its own terms.

Tracing and the certificate would find most of it too, and speak of graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from engine.errors import ConfigError
from engine.text.tokenizer_file import parse_tokenizer
from engine.wording import listed, shortened
from exporter.models.own import OwnConfig, PlainAttention, wrap

_WRITES = ("embed", "blocks", "head")
_BEHIND_SOURCE = ("encode", "source_keys_values")
_HERE = torch.empty(0, device="cpu").device.type


def try_own(model: nn.Module, config: OwnConfig, tokenizer: Tokenizer | None) -> None:
    """Run a model in eval mode on its longest text, or on a picture.

    Raises ConfigError for what it lacks, what it fails on, and what is not as it was described.
    """
    name = type(model).__name__
    places = {weight.device.type for weight in model.parameters()} - {_HERE}
    if places:
        raise ConfigError(f"{name} has weights on {listed(places)}; give a copy on the CPU")
    _check_tokenizer(tokenizer, config)
    with torch.no_grad():
        if config.num_decoder_layers:
            _try_writer(model, config, name)
        else:
            _try_one_pass(model, config, name)


def _check_tokenizer(tokenizer: Tokenizer | None, config: OwnConfig) -> None:
    if tokenizer is None:
        if config.image is None:
            raise ConfigError("a model of texts needs a tokenizer; give the one of the model")
        return
    try:
        parse_tokenizer(tokenizer.to_str().encode(), config.vocab_size)
    except ValueError as error:
        raise ConfigError(f"tokenizer: {error}; give the one of the model") from error


def _try_writer(model: nn.Module, config: OwnConfig, name: str) -> None:
    wanted = (*_WRITES, *(_BEHIND_SOURCE if config.max_source_len else ()))
    lacking = [method for method in wanted if not callable(getattr(model, method, None))]
    if lacking:
        raise ConfigError(
            f"{name} lacks {listed(lacking)}; GenerativeModel in exporter/models/own.py says what "
            "they do"
        )
    with _failing(f"{name} on a source of {config.max_source_len} tokens"):
        sources = _sources(model, config) if config.max_source_len else []
    length = config.max_target_len
    ids, position_ids = _ids(length, config), torch.arange(length)[None]
    attend = _Watched(config, position_ids, sources)
    with _failing(f"{name} on a text of {length} tokens"):
        hidden = model.blocks(model.embed(ids, position_ids), attend)  # type: ignore[operator]
        logits = model.head(hidden)  # type: ignore[operator]
    if sorted(attend.layers) != list(range(config.num_decoder_layers)):
        raise ConfigError(
            f"{name}.blocks calls attend for layers {listed(attend.layers) or 'none'}; it is "
            f"described with {config.num_decoder_layers}: each of them, from 0 on, once"
        )
    _check_shape(f"{name}.head", "logits", logits, (1, length, config.vocab_size))


def _sources(model: nn.Module, config: OwnConfig) -> list[tuple[Tensor, Tensor]]:
    length = config.max_source_len
    memory = model.encode(_ids(length, config), None)  # type: ignore[operator]
    pairs = list(model.source_keys_values(memory))  # type: ignore[operator]
    if len(pairs) != config.num_decoder_layers:
        raise ConfigError(
            f"it gives keys and values of the source for {len(pairs)} layers; it is described with "
            f"{config.num_decoder_layers}"
        )
    wide = config.num_heads * config.head_key_dim
    for key, value in pairs:
        _check_shape("source_keys_values", "keys", key, (1, length, wide))
        _check_shape("source_keys_values", "values", value, (1, length, wide))
    return pairs


def _try_one_pass(model: nn.Module, config: OwnConfig, name: str) -> None:
    if config.image is not None:
        what, length = "a picture", 0
        size = config.image.size
        given: tuple[Tensor, ...] = (torch.zeros(1, config.image.channels, size, size),)
    else:
        length = config.max_source_len
        what, ids = f"a text of {length} tokens", _ids(length, config)
        given = (ids, torch.ones_like(ids, dtype=torch.bool))
    with _failing(f"{name} on {what}"):
        logits, vector = wrap(model, config)(*given)
    each = (length,) if config.head.each_token else ()
    of_labels = (1, *each, len(config.labels)) if config.labels else None
    of_vector = (1, config.vector_width) if config.vector_width else None
    _check_shape(f"{name}.forward", "logits", logits, of_labels)
    _check_shape(f"{name}.forward", "a vector", vector, of_vector)


class _Watched(PlainAttention):
    """Attends over whole sequences, and knows which layers asked it to."""

    def __init__(
        self, config: OwnConfig, position_ids: Tensor, sources: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        super().__init__(
            config.num_heads, config.num_kv_heads, position_ids=position_ids, sources=sources
        )
        self.layers: list[int] = []
        self._widths = [n * config.head_key_dim for n in (config.num_heads, config.kv_heads)]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See Attend."""
        self.layers.append(layer)
        shape, (wide, shared) = query.shape[:2], self._widths
        given = (("a query", query, wide), ("a key", key, shared), ("a value", value, shared))
        for name, tensor, width in given:
            _check_shape(f"layer {layer}", name, tensor, (*shape, width))
        return super().__call__(layer, query, key, value)


def _ids(length: int, config: OwnConfig) -> Tensor:
    """Return the last token of the vocabulary again and again: a table that lacks it fails."""
    return torch.full((1, length), config.vocab_size - 1)


def _check_shape(who: str, what: str, found: object, wanted: tuple[int, ...] | None) -> None:
    given = "nothing" if found is None else f"a {type(found).__name__}"
    if isinstance(found, Tensor):
        given = f"{list(found.shape)}"
    described = "nothing" if wanted is None else f"{list(wanted)}"
    if given != described:
        raise ConfigError(f"{who} gives {given} for {what}; it is described as {described}")


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Say what failed, whatever the person's own code raises."""
    try:
        yield
    except Exception as error:
        reason = shortened(str(error).partition("\n")[0]) or type(error).__name__
        raise ConfigError(f"{what}: {reason}") from error
