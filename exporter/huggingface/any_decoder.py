"""Imports a decoder of transformers for which no family stands: its own code computes it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.wording import listed
from exporter.checkpoint import CONFIG_NAME, model_weights
from exporter.huggingface.family import SpecialTokens
from exporter.huggingface.reading import read_config, reading_by_transformers
from exporter.huggingface.weights.stored import FLOATS, StoredWeights
from exporter.huggingface.writing import finite, naming
from exporter.models.config import OriginalCode, TransformerConfig
from exporter.models.transformers_model import (
    TransformersModel,
    attention_options,
    build_original,
)
from exporter.progress import Progress

TITLE = "any other decoder of transformers, by its own code"
_OTHERS = "give the weights that were saved with this configuration"


class OriginalDecoder:
    """A model of transformers with its weights, in the widest type that they are stored in."""

    def __init__(self, directory: Path, raw: dict[str, Any], stored: StoredWeights) -> None:
        """Load it; CheckpointError says what is not taken over, before memory is taken for it."""
        self.path = directory / CONFIG_NAME
        read_config(raw, self.path)
        with naming(self.path), reading_by_transformers(self.path):
            self._code = OriginalCode(version=version("transformers"), config=raw)
            try:
                with torch.device("meta"):
                    empty = build_original(self._code)
            except CheckpointError as error:
                raise CheckpointError(f"{self.path}: {error}") from error
            if problem := _problem(empty, stored):
                raise CheckpointError(f"{self.path}: {problem}")
            self._model, about = type(empty).from_pretrained(
                directory,
                config=empty.config,
                dtype=_widest(stored),
                attn_implementation="eager",
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are told below, with their shapes
            )
            if others := sorted(about["mismatched_keys"]):
                wrong = [
                    f"{name} is {[*there]}, the configuration asks for {[*asked]}"
                    for name, there, asked in others
                ]
                raise CheckpointError(f"{directory}: wrong shapes: {listed(wrong)}; {_OTHERS}")
            unread = listed(sorted(about["unexpected_keys"]))
            if lacking := sorted(about["missing_keys"]):
                instead = f"; it has {unread}" if unread else ""
                raise CheckpointError(
                    f"{directory}: weights are missing: {listed(lacking)}{instead}; {_OTHERS}"
                )
            if unread:  # layers that the configuration leaves out, say
                kind = type(empty).__name__
                raise CheckpointError(f"{directory}: {kind} does not read {unread}; {_OTHERS}")
            try:
                self._attention = attention_options(self._model)
            except ValueError as error:
                raise CheckpointError(
                    f"{self.path}: the engine's attention does not compute it: {error}"
                ) from error
            head, table = self._model.get_output_embeddings(), self._model.get_input_embeddings()
        tied = {"tie_word_embeddings": head is not None and head.weight is table.weight}
        self._code = self._code.model_copy(update={"config": {**raw, **tied}})
        self.options: dict[str, Any] = self._model.config.to_dict()
        self.num_parameters = sum(weight.numel() for weight in self._model.parameters())

    def config(self, tokens: SpecialTokens, max_len: int | None) -> TransformerConfig:
        """Return what the engine has to know; ValidationError for what it does not have."""
        most = getattr(self._model.config, "max_position_embeddings", None) or max_len
        if most is None:
            raise CheckpointError(f"{self.path} says no longest text; give --max-len")
        return TransformerConfig.of(
            {
                "architecture": "decoder",
                "d_ff": 1,
                "vocab_size": self._model.config.vocab_size,
                "max_target_len": min(most, max_len or most),
                "positions.kind": "learned",
                "eos_token_id": tokens.eos,
                "code": self._code,
                **self._attention,
            }
        )

    def weights(self, config: TransformerConfig, progress: Progress) -> Iterator[Tensor]:
        """Yield the weights of a checkpoint, each made float32 when it is asked for."""
        model = TransformersModel(config, self._model)
        with reading_by_transformers(self.path), torch.no_grad():
            model(torch.zeros(1, 2, dtype=torch.long))
        state, wanted = model.state_dict(), model_weights(config)
        named = (
            (
                one.name.removeprefix("decoder.model.").replace(".body.", "."),
                state[one.name].float(),
            )
            for one in wanted
        )
        return finite(named, len(wanted), progress, self.path.parent)


def _widest(stored: StoredWeights) -> torch.dtype:
    """Return the type that all weights fit in: not what `config.json` says of them."""
    kinds = {one.dtype for one in stored.values()}.intersection(FLOATS) or {"float32"}
    widest: torch.dtype = reduce(torch.promote_types, (getattr(torch, kind) for kind in kinds))
    return widest


def _problem(empty: Any, stored: StoredWeights) -> str | None:
    """Say why a model without weights is not loaded: memory is taken for it then."""
    weights = dict(empty.named_parameters())
    body = empty.base_model_prefix
    read = [name for name in stored if name in weights or f"{body}.{name}" in weights]
    kinds = {name: stored[name].dtype for name in read}
    if others := [f"{name} is of {kind}" for name, kind in kinds.items() if kind not in FLOATS]:
        return f"wrong types: {listed(others)}; supported: {', '.join(FLOATS)}"
    asked = sum(weight.numel() for weight in weights.values())
    given = sum(prod(one.shape) for one in stored.values())
    if asked > 2 * given:  # which are missing is told by name, if they are few
        return f"it asks for {asked:,} parameters, and the weights are {given:,}"
    has_experts = set(empty.get_experts_implementation().values()) != {"eager"}
    return "layers of experts are not supported" if has_experts else None
