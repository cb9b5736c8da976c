"""Reads what sentence-transformers does around a model: how it reads texts, and makes a vector."""

from __future__ import annotations

import filecmp
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from engine.errors import CheckpointError
from engine.json_file import read_bounded
from engine.package.manifest import MAX_LENGTH, LabelScores, Prompts
from engine.wording import listed, problems_of, shortened
from exporter.models.config import PositiveInt

MODULES_NAME = "modules.json"
_CONFIG_NAME = "config.json"
_AROUND_NAME = "config_sentence_transformers.json"
_TOKENIZER_NAME = "tokenizer_config.json"
_TRANSFORMER_NAMES = tuple(  # older ones are named for the model
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "xlm-roberta")
)
_MAX_BYTES = 2**20
_MAX_NAME = 255  # characters, as file systems have it
_MAX_TOKENS_BYTES = 2**24  # a file that lists added tokens
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
_SCORES: dict[str, LabelScores] = {  # by the activation that makes them of logits
    "Identity": "none",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
}
_NO_EFFECT = (  # options for loading a model that change no more than the last bits of a vector
    "add_pooling_layer",
    "attn_implementation",
    "dtype",
    "torch_dtype",
    "trust_remote_code",
)
_READ = ("Pooling", "Dense", "Normalize")  # modules that have options
_VECTOR = "sentence_embedding"  # what they read and give, unless their files say more


class Dense(BaseModel):
    """`config.json` of a dense layer."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    in_features: PositiveInt
    out_features: PositiveInt
    bias: bool = True
    activation_function: str = "Tanh"
    use_residual: Literal[False] = False

    @field_validator("activation_function")
    @classmethod
    def _is_known(cls, given: str) -> str:
        name = given.rpartition(".")[2]
        if name not in _ACTIVATIONS or not given.startswith("torch."):
            raise ValueError(
                f"activation_function is {shortened(given)}; supported: "
                f"{', '.join(_ACTIVATIONS)} of torch.nn"
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
    pools_prompts: bool = True  # prompts in front of texts count as they do


class _Module(BaseModel):
    path: Annotated[str, AfterValidator(lambda path: path.removesuffix("/"))]
    type: str

    @property
    def kind(self) -> str:
        is_theirs = self.type.startswith("sentence_transformers.")  # else code beside the model
        return self.type.rpartition(".")[2] if is_theirs else self.type


def read_modules(directory: Path) -> SentenceModules | None:
    """Return what `modules.json` says, None without one.

    Raises CheckpointError for a module that is not known, or in another order.
    """
    path = directory / MODULES_NAME
    if not os.path.lexists(path):  # a link that leads nowhere is a copy with parts missing
        return None
    with _reading(path):
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
        _check_folder(directory, modules[0])
        found = {
            module.kind: _read(directory, module) for module in modules if module.kind in _READ
        }
        for kind, said in found.items():
            for name in ("module_input_name", "module_output_name"):
                if said.get(name, _VECTOR) not in (None, _VECTOR):
                    raise ValueError(
                        f"{name} of {kind} is {shortened(str(said[name]))}; supported: {_VECTOR}"
                    )
        dense, pooling = found.get("Dense"), found.get("Pooling")
        return SentenceModules(
            pooling=None if pooling is None else _pooling(pooling),
            dense=None if dense is None else Dense.model_validate(dense),
            dense_path=next((one.path for one in modules if one.kind == "Dense"), None),
            normalize="Normalize" in kinds,
            pools_prompts=pooling is None or pooling.get("include_prompt") is not False,
        )


def _pooling(config: dict[str, Any]) -> Literal["first", "mean", "max"]:
    chosen = [name for field, name in _POOLING_FIELDS.items() if config.get(field)]
    modes = config.get("pooling_mode", chosen or "mean")
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in [*_POOLINGS]:
        raise ValueError(f"it pools by {shortened(str(modes))}; supported: {', '.join(_POOLINGS)}")
    return _POOLINGS[modes[0]]


def _check_folder(directory: Path, transformer: _Module) -> None:
    """Refuse a model whose files are others than those beside `modules.json`, which are read."""
    if transformer.path in ("", "."):
        return
    _check_name(transformer)
    folder = directory / transformer.path
    names = sorted(os.listdir(folder)) if folder.is_dir() else []
    for name in (name for name in names if not (folder / name).is_dir()):
        if not filecmp.cmp(folder / name, directory / name, shallow=False):
            raise ValueError(
                f"its model is in {transformer.path}, whose {shortened(name)} is another than that "
                "beside this file, which would be imported; copy the files of the folder beside it"
            )


def _check_name(module: _Module) -> None:
    is_name = module.path != ".." and Path(module.path).name == module.path
    if not is_name or len(module.path) > _MAX_NAME:
        raise ValueError(
            f"the path of {module.kind} is {shortened(module.path)!r}; supported: the name of a "
            f"folder beside this file, of up to {_MAX_NAME} characters"
        )


def _read(directory: Path, module: _Module) -> dict[str, Any]:
    if not module.path:
        raise ValueError(f"{module.kind} has no path; supported: the name of a folder")
    _check_name(module)
    path = directory / module.path / _CONFIG_NAME
    if module.kind == "Normalize" and not path.exists():  # has none before release 5
        return {}
    content = read_bounded(path, _MAX_BYTES)
    return TypeAdapter(dict[str, Any]).validate_json(content)


def _without_effect(options: dict[str, Any] | None) -> dict[str, Any] | None:
    if others := sorted({*(options or {})} - {*_NO_EFFECT}):
        raise ValueError(
            f"{listed(others)} may change a vector; supported: {', '.join(_NO_EFFECT)}, so write "
            "the others into config.json or tokenizer_config.json"
        )
    return options


class SentenceTexts(BaseModel):
    """How texts are read, in our terms."""

    model_config = ConfigDict(frozen=True)

    limit: int | None = None  # tokens; longer texts are cut; None: what the model takes
    lowers: bool = False  # letters, whatever the tokenizer does
    activation_fn: str = ""  # makes a score of a logit, if a model compares two texts
    prompts: Prompts = {}  # stand in front of texts, by their names
    default_prompt: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def label_scores(self) -> LabelScores | None:
        """Return how it does that; None if no file says it. ValueError if we cannot do it."""
        if not self.activation_fn:
            return None
        package, _, name = self.activation_fn.rpartition(".")
        if name not in _SCORES or package.partition(".")[0] != "torch":
            raise ValueError(
                f"activation_fn of sentence-transformers is {shortened(self.activation_fn)}; "
                f"supported: {', '.join(_SCORES)} of torch.nn"
            )
        return _SCORES[name]


class _Method(BaseModel):
    """The part of a model's output that the modules read."""

    method: Literal["forward"] = "forward"
    method_output_name: Literal["last_hidden_state", "logits"] = "last_hidden_state"


class _Modalities(BaseModel):
    text: _Method


_Options = Annotated[dict[str, Any] | None, AfterValidator(_without_effect)]


class _Transformer(BaseModel):
    """The file of the first module; releases have other names for options of what it loads."""

    transformer_task: Literal["feature-extraction", "sequence-classification"] | None = None
    modality_config: _Modalities | None = None
    query_expansion: None = None
    processing_kwargs: _Options = None
    model_args: _Options = None
    model_kwargs: _Options = None
    config_args: _Options = None
    config_kwargs: _Options = None
    tokenizer_args: _Options = None
    processor_kwargs: _Options = None
    max_seq_length: PositiveInt | None = None
    do_lower_case: bool = False


class _Tokenizer(BaseModel):
    """`tokenizer_config.json`."""

    model_max_length: Annotated[float, Field(gt=0)] | None = None  # 1e30: there is no limit


class _CrossEncoder(BaseModel):
    """A model that compares two texts."""

    activation_fn: str | None = None


class _Original(BaseModel):
    """`config.json`; a model that compares two texts has one of them, by its age."""

    sentence_transformers: _CrossEncoder | None = None
    sbert_ce_default_activation_function: str | None = None


class _Around(_CrossEncoder):
    """`config_sentence_transformers.json`."""

    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None
    truncate_dim: int | None = None

    @property
    def all_prompts(self) -> Prompts:
        """Its prompts; sentence-transformers has empty ones where it looks for some by itself."""
        given = {name: text or "" for name, text in (self.prompts or {}).items()}
        return {"query": "", "document": "", **given} if any(given.values()) else {}

    @model_validator(mode="after")
    def _has_default(self) -> Self:
        prompts = self.all_prompts
        if prompts and self.default_prompt_name not in (None, *prompts):
            name = shortened(str(self.default_prompt_name))
            raise ValueError(f"default_prompt_name is {name}, none of prompts ({listed(prompts)})")
        return self

    def notes(self) -> Iterator[str]:
        """Say what sentence-transformers does besides."""
        if self.truncate_dim is not None:
            yield f"{_AROUND_NAME}: truncate_dim is {self.truncate_dim}; here vectors stay whole"


_Fields = TypeVar("_Fields", bound=BaseModel)


def read_sentence_texts(directory: Path, config: Mapping[str, Any]) -> SentenceTexts | None:
    """Return how texts are read; None of a model that sentence-transformers did not save.

    Raises ValidationError for fields of `config` that cannot be, CheckpointError for other files.
    """
    original = _Original.model_validate(config)
    told = [original.sbert_ce_default_activation_function]
    if original.sentence_transformers is not None:
        told.insert(0, original.sentence_transformers.activation_fn)
    elif told == [None] and not (directory / MODULES_NAME).is_file():
        return None
    transformer = _read_fields(_Transformer, directory, *_TRANSFORMER_NAMES)
    tokenizer = _read_fields(_Tokenizer, directory, _TOKENIZER_NAME)
    around = _read_fields(_Around, directory, _AROUND_NAME)
    limit = transformer.max_seq_length or tokenizer.model_max_length
    return SentenceTexts(
        limit=limit and int(min(limit, MAX_LENGTH)),
        lowers=transformer.do_lower_case,
        activation_fn=next(filter(None, (*told, around.activation_fn)), ""),
        prompts=around.all_prompts,
        default_prompt=around.default_prompt_name if around.all_prompts else None,
        notes=tuple(around.notes()),
    )


def _read_fields(fields: type[_Fields], directory: Path, *names: str) -> _Fields:
    """Return what the first file of these says that is there; its defaults without any."""
    for path in (directory / name for name in names):
        if os.path.lexists(path):
            with _reading(path):
                return fields.model_validate_json(read_bounded(path, _MAX_TOKENS_BYTES))
    return fields()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what is wrong with a file into a CheckpointError that names it."""
    try:
        yield
    except ValidationError as error:
        problem = problems_of(error, path.name)
        raise CheckpointError(f"{path}: {problem}; save the model again") from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path}: {error}; save the model again") from error
