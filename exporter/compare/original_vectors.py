"""Reads what makes the vector of a text of hidden states, once more and plainly.

It shares no line with the import, so that what that reads wrongly differs here. Texts are pooled
one by one, without their padding.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn

from engine.errors import CertificateError, CheckpointError
from engine.json_file import read_bounded
from engine.wording import listed, shortened
from exporter.checkpoint import CONFIG_NAME
from exporter.models import TransformerConfig

PROMPTS_NAME = "config_sentence_transformers.json"
_MODULES_NAME = "modules.json"
_LENGTH_NAME = "sentence_bert_config.json"
_OF_VECTORS = ("module_input_name", "module_output_name")
_MOST_BYTES = 2**20
_POOLINGS: Mapping[str, Callable[[Tensor], Tensor]] = {  # hidden states (T, D) of a text become (D)
    "cls": lambda text: text[0],
    "max": lambda text: text.amax(dim=0),
    "mean": lambda text: text.mean(dim=0),
    "mean_sqrt_len_tokens": lambda text: text.sum(dim=0) / len(text) ** 0.5,
    "weightedmean": lambda text: (_places(text) * text).sum(dim=0) / _places(text).sum(),
    "lasttoken": lambda text: text[-1],
}
_OLDER = {  # a field for each, in the order in which their vectors are joined
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


class Step(NamedTuple):
    """A module between the hidden states and the vector."""

    kind: str
    name: str
    compute: Callable[[Sequence[Tensor]], Sequence[Tensor]]  # each (T, D) or (D)


class Modules(NamedTuple):
    """The modules that sentence-transformers has around a model."""

    steps: Sequence[Step]  # from its hidden states to the vector
    prompts: Mapping[str, str]  # that count in the vector
    default_prompt: str
    most: float | None = None  # tokens of a text, if a file says it

    @classmethod
    def of(cls, directory: Path) -> Modules:
        """Read the modules of a directory, a mean without any.

        CheckpointError if one of them is not known.
        """
        path = directory / _MODULES_NAME
        if not os.path.lexists(path):
            return cls([_pooling({}, directory)], {}, "")
        try:
            steps, around = [], _read(directory / PROMPTS_NAME)
            for module in _read(path)[1:]:
                folder = directory / module["path"]
                said = _read(folder / CONFIG_NAME)
                if {said.get(name) for name in _OF_VECTORS} - {None, "sentence_embedding"}:
                    raise ValueError(f"{folder.name} computes no vectors")
                steps.append(_KINDS[module["type"].rpartition(".")[2]](said, folder))
                if said.get("include_prompt") is False:
                    around = {}
            prompts = {name: text for name, text in (around.get("prompts") or {}).items() if text}
            default = prompts.get(around.get("default_prompt_name"), "")
            most = _read(directory / _LENGTH_NAME).get("max_seq_length")
            return cls(steps, prompts, default, most)
        except (ValueError, LookupError, TypeError, AttributeError, OSError, RuntimeError) as error:
            why = shortened(f"{type(error).__name__}: {error}")
            raise CheckpointError(
                f"{path}: its modules are not compared, for {why}; import with --no-comparison"
            ) from error

    def compare(self, config: TransformerConfig, asked_len: int | None) -> list[str]:
        """Return in words what was compared; CertificateError says which prompts differ.

        Texts are cut where a person has asked for it, or where the modules say.
        """
        most = min(asked_len or self.most or config.max_source_len, config.max_source_len)
        if config.cut_at and config.cut_at != most and (asked_len or self.most):
            raise CertificateError(f"its texts are cut at {config.cut_at} tokens, not {most}")
        here = {name: text for name, text in config.prompts.items() if text}
        default = here.get(config.default_prompt or "", "")
        if (here, default) != (self.prompts, self.default_prompt):
            raise CertificateError(
                f"the prompts in front of its texts are {shortened(str(here))}, by default "
                f"{shortened(default)!r}, there {shortened(str(self.prompts))}, by default "
                f"{shortened(self.default_prompt)!r}"
            )
        said = [f"vectors ({listed([step.name for step in self.steps])})"]
        return [*said, *([f"{len(here)} prompt{'s' * (len(here) > 1)}"] if here else [])]


def _read(path: Path) -> Any:
    return json.loads(read_bounded(path, _MOST_BYTES)) if path.exists() else {}


def _pooling(said: Mapping[str, Any], folder: Path) -> Step:
    chosen = [name for field, name in _OLDER.items() if said.get(field)]
    modes = said.get("pooling_mode", chosen or "mean")
    modes = [modes] if isinstance(modes, str) else modes
    kinds = [_POOLINGS[mode] for mode in modes]
    return Step(
        "Pooling",
        f"Pooling by {' and '.join(modes)}",
        lambda texts: [torch.cat([pool(text) for pool in kinds]) for text in texts],
    )


def _dense(said: Mapping[str, Any], folder: Path) -> Step:
    path = folder / "model.safetensors"
    weights = (
        safetensors.torch.load_file(path)
        if path.is_file()
        else torch.load(folder / "pytorch_model.bin", map_location="cpu", weights_only=True)
    )
    weights = {name: weight.float() for name, weight in weights.items()}
    named = said.get("activation_function", "torch.nn.Tanh")  # nor is another's code run there
    activation = named.rpartition(".")[2] if named.startswith("torch.") else "Tanh"
    activate: nn.Module = getattr(nn, activation)()

    def compute(vector: Tensor) -> Tensor:
        dense = nn.functional.linear(vector, weights["linear.weight"], weights.get("linear.bias"))
        found: Tensor = activate(dense)
        if said.get("use_residual"):
            other = weights.get("residual.weight")
            found = found + (vector if other is None else other @ vector)
        return found

    return Step("Dense", f"Dense with {activation}", lambda vectors: [compute(v) for v in vectors])


def _normalize(said: Mapping[str, Any], folder: Path) -> Step:
    unit = partial(nn.functional.normalize, dim=0)
    return Step("Normalize", "Normalize", lambda vectors: [unit(vector) for vector in vectors])


def _places(text: Tensor) -> Tensor:
    return torch.arange(1, len(text) + 1, dtype=text.dtype)[:, None]


_KINDS: Mapping[str, Callable[[Mapping[str, Any], Path], Step]] = {
    "Pooling": _pooling,
    "Dense": _dense,
    "Normalize": _normalize,
}
