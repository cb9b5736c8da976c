"""Reads what sentence-transformers does behind a model: pooling, a dense layer, a norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, field_validator

from engine.errors import CheckpointError
from engine.json_file import read_bounded
from engine.wording import listed, problems_of, shortened
from exporter.models.config import PositiveInt

MODULES_NAME = "modules.json"
_CONFIG_NAME = "config.json"
_MAX_BYTES = 2**20
_POOLINGS: dict[str, Literal["first", "mean", "max"]] = {  # by the name of sentence-transformers
    "cls": "first",
    "mean": "mean",
    "max": "max",
}
_POOLING_FIELDS = {  # older files have a field for each
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_ACTIVATIONS: dict[str, Literal["tanh", "linear", "relu", "gelu"]] = {
    "Tanh": "tanh",
    "Identity": "linear",
    "ReLU": "relu",
    "GELU": "gelu",
}


_READ = ("Pooling", "Dense")  # modules that have options


class Dense(BaseModel):
    """`config.json` of a dense layer."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    in_features: PositiveInt
    out_features: PositiveInt
    bias: bool = True
    activation_function: str = "Tanh"

    @field_validator("activation_function")
    @classmethod
    def _is_known(cls, given: str) -> str:
        name = given.rpartition(".")[2]
        if name not in _ACTIVATIONS:
            raise ValueError(
                f"activation_function is {shortened(name)}; supported: {', '.join(_ACTIVATIONS)}"
            )
        return name

    @property
    def activation(self) -> Literal["tanh", "linear", "relu", "gelu"]:
        """Our name of the activation."""
        return _ACTIVATIONS[self.activation_function]


class SentenceModules(BaseModel):
    """The steps from the last layer to a vector, in our terms."""

    model_config = ConfigDict(frozen=True)

    pooling: Literal["first", "mean", "max"] | None = "mean"  # None: it gives no vectors
    dense: Dense | None = None
    dense_path: str | None = None  # the folder of its weights
    normalize: bool = False


class _Module(BaseModel):
    path: str
    type: str

    @property
    def kind(self) -> str:
        return self.type.rpartition(".")[2]


def read_modules(directory: Path) -> SentenceModules | None:
    """Return what `modules.json` says, None without one.

    Raises CheckpointError for a module that is not known, or in another order.
    """
    path = directory / MODULES_NAME
    if not path.is_file():
        return None
    try:
        modules = TypeAdapter(list[_Module]).validate_json(read_bounded(path, _MAX_BYTES))
        kinds = [module.kind for module in modules]
        if kinds != ["Transformer"] and kinds not in (
            ["Transformer", "Pooling", *dense, *normalize]
            for dense in ([], ["Dense"])
            for normalize in ([], ["Normalize"])
        ):
            raise ValueError(
                f"its modules are {listed(kinds)}; supported: Transformer, of vectors with Pooling "
                "and then Dense, Normalize or both"
            )
        found = {
            module.kind: _read(directory, module) for module in modules if module.kind in _READ
        }
        dense = found.get("Dense")
        return SentenceModules(
            pooling=_pooling(found["Pooling"]) if "Pooling" in found else None,
            dense=None if dense is None else Dense.model_validate(dense),
            dense_path=next((one.path for one in modules if one.kind == "Dense"), None),
            normalize="Normalize" in kinds,
        )
    except ValidationError as error:
        problem = problems_of(error, MODULES_NAME)
        raise CheckpointError(f"{path}: {problem}; save the model again") from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: {error}; save the model again") from error


def _pooling(config: dict[str, Any]) -> Literal["first", "mean", "max"]:
    chosen = [name for field, name in _POOLING_FIELDS.items() if config.get(field)]
    modes = config.get("pooling_mode", chosen)
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ValueError(f"it pools by {shortened(str(modes))}; supported: {', '.join(_POOLINGS)}")
    return _POOLINGS[modes[0]]


def _read(directory: Path, module: _Module) -> dict[str, Any]:
    if not module.path or Path(module.path).name != module.path:
        raise ValueError(f"the path of {module.kind} is {shortened(module.path)}, no folder in it")
    content = read_bounded(directory / module.path / _CONFIG_NAME, _MAX_BYTES)
    return TypeAdapter(dict[str, Any]).validate_json(content)
