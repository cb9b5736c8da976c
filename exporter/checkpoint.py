"""A trained model on disk: configuration, weights and tokenizer in one directory.

`config.json`, `model.safetensors`, `tokenizer.json` (absent for an image model), `samples.json`
(absent where there are no sentences to try the model with), `target_tokenizer.json` (where what is
written has a tokenizer of its own), `chat.json` (where the model was trained with conversations).
Nothing is unpickled: weights are safetensors, the rest is JSON. Weights that the model shares
(a tied output projection) are stored once, under the first of their names.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from engine.errors import CheckpointError
from engine.json_file import parse_object, read_bounded
from engine.package.manifest import MAX_ORIGINAL
from engine.package.recognised import recognise
from engine.requests.generation_defaults import GenerationDefaults
from engine.text.chat_format import CHAT_NAME, ChatFormat, read_chat_format
from engine.text.tokenizer_file import read_tokenizer_file
from engine.wording import listed, problems_of, shortened
from exporter.files import Content, write_directory, writing_to
from exporter.models import build_model
from exporter.models.config import TransformerConfig

FORMAT_VERSION = 1  # its rule is that of packages, in engine/package/manifest.py
CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
TOKENIZER_NAME = "tokenizer.json"
SAMPLES_NAME = "samples.json"
TARGET_TOKENIZER_NAME = "target_tokenizer.json"
REPORT_NAME = "report.json"  # written by the run that made it
_MAX_CONFIG_BYTES = 2**20
_MAX_SAMPLES_BYTES = 2**20
_FEW_LAYERS = 128  # built in a second


class CheckpointConfig(BaseModel):
    """`config.json`, in which an option stands if it is not its default."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format_version: Annotated[int, Field(gt=0, le=FORMAT_VERSION)] = FORMAT_VERSION
    task: str  # the model was trained for it: a name of `exporter.tasks`, or the user's own
    model: TransformerConfig
    # An imported model's values for options that requests leave away.
    generation: GenerationDefaults = GenerationDefaults()
    # The comparison of an imported model with its original, in words; "": it was trained here.
    original: Annotated[str, Field(max_length=MAX_ORIGINAL)] = ""

    def content(self) -> bytes:
        """Return the file; CheckpointError if it is larger than one may be."""
        given = self.model_dump(mode="json", exclude_defaults=True)
        described = {"format_version": self.format_version, **given}
        raw = (json.dumps(described, indent=2, ensure_ascii=False) + "\n").encode()
        if len(raw) > _MAX_CONFIG_BYTES:
            raise CheckpointError(
                f"{CONFIG_NAME} of the checkpoint would have {len(raw):,} bytes, more than "
                f"{_MAX_CONFIG_BYTES:,}; give the model fewer or shorter labels"
            )
        return raw


@dataclass(frozen=True)
class TextFiles:
    """The files for texts beside the tokenizer."""

    target_tokenizer: Tokenizer | None = None  # None: outputs have the inputs' tokenizer
    chat: ChatFormat | None = None  # how a conversation becomes a text; None: not at all

    def content(self) -> dict[str, bytes]:
        """Return the files by name."""
        found = {}
        if self.target_tokenizer is not None:
            found[TARGET_TOKENIZER_NAME] = self.target_tokenizer.to_str(pretty=True).encode()
        if self.chat is not None:
            found[CHAT_NAME] = self.chat.model_dump_json(indent=2).encode()
        return found


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint; the model is in eval mode."""

    path: Path
    config: CheckpointConfig
    model: nn.Module
    tokenizer: Tokenizer | None  # None: vision-encoder
    samples: tuple[str, ...] = ()  # sentences to try it with
    text: TextFiles = TextFiles()

    @property
    def target_tokenizer(self) -> Tokenizer | None:
        """The tokenizer of what is written."""
        return self.text.target_tokenizer or self.tokenizer


class ModelWeight(NamedTuple):
    """A weight of a model, which may have several places in it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name under which it is stored."""
        return self.names[0]


class _Samples(BaseModel):
    """`samples.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    texts: tuple[str, ...]


class _NoDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves what would be drawn at random as it is: a file has all weights of the model."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        """Run one operation it draws."""
        is_draw = func in (torch.ops.aten.uniform_.default, torch.ops.aten.normal_.default)
        return args[0] if is_draw else func(*args, **(kwargs or {}))


def load_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Read a checkpoint, checking all of it against its configuration.

    Raises CheckpointError naming every missing, unexpected and misshapen weight at once.
    """
    directory = Path(path)
    config = check_checkpoint(directory)
    tokenizer = _read_tokenizer(directory, config.model)
    with _NoDraws():  # type: ignore[no-untyped-call]
        model = build_model(config.model)
    path_of_weights = directory / WEIGHTS_NAME
    with reading_weights(path_of_weights):
        weights = safetensors.torch.load_file(path_of_weights)
    load_weights(model, weights, path=path_of_weights)
    model.eval()
    text = _read_text(directory, config.model)
    return Checkpoint(directory, config, model, tokenizer, _read_samples(directory), text)


def save_checkpoint(
    path: str | os.PathLike[str],
    task: str,
    model: nn.Module,
    tokenizer: Tokenizer | None,
    samples: Sequence[str] = (),
    generation: GenerationDefaults = GenerationDefaults(),  # frozen
    text: TextFiles = TextFiles(),
) -> None:
    """Write a checkpoint of `model`, whose `config` attribute is its TransformerConfig.

    `samples` are sentences that it is to be tried with when it is exported, `generation` what its
    package gives to requests that leave options away.

    A new directory appears at once, complete. In an existing one each file is replaced by a
    rename, the weights last, so saving again with the same configuration is atomic too.
    Raises CheckpointError if the directory cannot be written, and for what load_checkpoint would
    refuse: a module that is none of exporter.models, a tokenizer that is missing.
    """
    config = _checked_config(task, model, tokenizer).model_copy(update={"generation": generation})
    weights = (weight.float() for weight in unique_weights(model).values())
    stream_checkpoint(path, config, tokenizer, weights, text, samples)


def stream_checkpoint(
    path: str | os.PathLike[str],
    config: CheckpointConfig,
    tokenizer: Tokenizer | None,
    weights: Iterable[torch.Tensor],
    text: TextFiles = TextFiles(),
    samples: Sequence[str] = (),
) -> None:
    """Do as `save_checkpoint` for a model that is nowhere whole.

    `weights` are those of `model_weights(config.model)`, float32, in that order; each is written
    before the next one is asked for.
    """
    files: dict[str, Content] = {CONFIG_NAME: config.content()}
    if samples:
        files[SAMPLES_NAME] = _Samples(texts=tuple(samples)).model_dump_json(indent=2).encode()
    if tokenizer is not None:
        files[TOKENIZER_NAME] = tokenizer.to_str(pretty=True).encode()
    files |= text.content()
    files[WEIGHTS_NAME] = streamed_weights(model_weights(config.model), weights)
    write_files(Path(path), files)


def write_files(directory: Path, files: Mapping[str, Content]) -> None:
    """Write the files of a checkpoint, and remove those of an earlier one that it does not have."""
    with writing_to(directory):
        write_directory(directory, files)
        remove_other_files(directory, files)


def remove_other_files(directory: Path, names: Collection[str]) -> None:
    """Remove the files of an earlier checkpoint that this one does not have."""
    for name in (SAMPLES_NAME, TARGET_TOKENIZER_NAME, CHAT_NAME, REPORT_NAME):
        if name not in names:
            (directory / name).unlink(missing_ok=True)


def streamed_weights(
    described: Sequence[ModelWeight], weights: Iterable[torch.Tensor]
) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file: the size of its header, the header, the tensors."""
    header, end = {}, 0
    for weight in described:
        begin, end = end, end + 4 * math.prod(weight.shape)
        offsets = [begin, end]
        header[weight.name] = {"dtype": "F32", "shape": weight.shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    yield len(text).to_bytes(8, "little") + text
    remaining = iter(weights)  # not in a zip, which keeps a weight while it asks for the next
    for weight in described:
        tensor = next(remaining)
        assert tensor.shape == weight.shape and tensor.dtype == torch.float32, weight.name
        yield tensor.contiguous().numpy().data
        del tensor
    assert next(remaining, None) is None, "there are no more weights than are described"


def check_checkpoint(directory: Path) -> CheckpointConfig:
    """Return the configuration of a checkpoint whose weights, by name and shape, are what it asks.

    Nothing is loaded. Raises CheckpointError naming all that does not fit.
    """
    config = read_config(directory)
    _check_header(directory, config.model)
    return config


def read_config(directory: Path) -> CheckpointConfig:
    """Return the `config.json` of a checkpoint."""
    if problem := recognise(directory).problem("checkpoint"):
        raise CheckpointError(problem)
    path = directory / CONFIG_NAME
    try:
        content = parse_object(read_bounded(path, _MAX_CONFIG_BYTES))
        version = content.get("format_version")
        if isinstance(version, int) and version > FORMAT_VERSION:
            raise CheckpointError(
                f"{directory}: checkpoint format {shortened(version)} is newer than "
                f"{FORMAT_VERSION}, the newest that this release reads; upgrade tokenweir"
            )
        return CheckpointConfig.model_validate_json(json.dumps(content))
    except ValidationError as error:
        problems = problems_of(error, CONFIG_NAME)
        raise CheckpointError(f"{path} is not valid: {problems}; train it again") from error
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; train it again") from error


def check_replaceable(out: Path) -> None:
    """Keep what is not a checkpoint from being written over: the original itself, for one."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    try:
        read_config(out)
    except CheckpointError as error:
        raise CheckpointError(
            f"{out} exists and is not a checkpoint, so it is not written to; "
            "give another directory, or remove it"
        ) from error


def model_weights(config: TransformerConfig) -> tuple[ModelWeight, ...]:
    """Return every weight of a model, shared ones once; nothing is allocated."""
    return _weights_of_config(config.model_dump_json())


@lru_cache(maxsize=4)  # an import asks several times, and modules take a while to be made
def _weights_of_config(config: str) -> tuple[ModelWeight, ...]:
    with torch.device("meta"):
        return _described(build_model(TransformerConfig.model_validate_json(config)))


def unique_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a model with shared weights once, under their first name."""
    return {name: tensor.cpu().contiguous() for name, tensor in _weights_of(model).items()}


def load_weights(model: nn.Module, weights: Mapping[str, torch.Tensor], *, path: Path) -> None:
    """Copy `weights` into `model`; CheckpointError names everything that does not fit at once."""
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    _check_fit(_described(model), shapes, path)
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in weights.items():
            state[name].copy_(tensor)


def _check_fit(
    weights: Sequence[ModelWeight], shapes: Mapping[str, tuple[int, ...]], path: Path
) -> None:
    """Compare stored shapes with those of a model's weights."""
    wanted = {name: weight.shape for weight in weights for name in weight.names}
    problems = {
        "missing weights": [one.name for one in weights if shapes.keys().isdisjoint(one.names)],
        "unexpected weights": [name for name in shapes if name not in wanted],
        "wrong shapes": [
            f"{name} is {list(shapes[name])}, the configuration asks for {list(shape)}"
            for name, shape in wanted.items()
            if name in shapes and shapes[name] != shape
        ],
    }
    found = [f"{what}: {listed(names)}" for what, names in problems.items() if names]
    if found:
        raise CheckpointError(
            f"{path} does not fit its {CONFIG_NAME}: {'; '.join(found)}; "
            "give the weights that were saved with this configuration"
        )


def check_layers(num_weights: int, config: TransformerConfig, path: Path) -> None:
    """Refuse more layers than there are weights before they are built; of few, all are named."""
    num_layers = config.num_encoder_layers + config.num_decoder_layers
    if num_layers > max(num_weights, _FEW_LAYERS):
        raise CheckpointError(
            f"{path} has {num_weights:,} weights, the configuration asks for {num_layers:,} "
            "layers, each with several; give the weights that were saved with this configuration"
        )


def _checked_config(task: str, model: nn.Module, tokenizer: Tokenizer | None) -> CheckpointConfig:
    """Return the configuration to write; CheckpointError if what is given cannot be loaded."""
    config, name = getattr(model, "config", None), type(model).__name__
    if not isinstance(config, TransformerConfig):
        raise CheckpointError(
            f"{name}.config must be a TransformerConfig, got "
            f"{type(config).__name__}; save a model of exporter.models"
        )
    if not isinstance(model, nn.Module) or {*_described(model)} != {*model_weights(config)}:
        raise CheckpointError(
            f"{name} does not have the weights that its config describes; save a model of "
            "exporter.models"
        )
    if not (
        config.architecture == "vision-encoder"
        if tokenizer is None
        else isinstance(tokenizer, Tokenizer)
    ):
        raise CheckpointError(
            f"tokenizer is a {type(tokenizer).__name__}, and {config.architecture} needs a "
            "tokenizers.Tokenizer; give the one that the model was trained with"
        )
    if not isinstance(task, str):
        raise CheckpointError(f"task is a {type(task).__name__}; give a name for what it does")
    return CheckpointConfig(task=task, model=config)


def _described(model: nn.Module) -> tuple[ModelWeight, ...]:
    names: dict[str, list[str]] = {}
    for name, first in _aliases(model).items():
        names.setdefault(first, []).append(name)
    weights = _weights_of(model).items()
    return tuple(ModelWeight(tuple(names[name]), tuple(one.shape)) for name, one in weights)


def _weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights of a model, shared ones under their first name."""
    aliases = _aliases(model)
    return {
        name: tensor.detach()
        for name, tensor in model.state_dict(keep_vars=True).items()
        if aliases[name] == name
    }


def _aliases(model: nn.Module) -> dict[str, str]:
    """Return, for every name of the state dict, the first name of the same tensor."""
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(tensor), name)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }


def _check_header(directory: Path, config: TransformerConfig) -> None:
    """Compare the shapes in the header of the weights with the configuration, building nothing."""
    path = directory / WEIGHTS_NAME
    if not path.is_file():
        raise CheckpointError(f"{directory} has no {WEIGHTS_NAME}; copy or train it again")
    with reading_weights(path), safe_open(path, framework="pt") as file:
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    check_layers(len(shapes), config, path)
    _check_fit(model_weights(config), shapes, path)


@contextmanager
def reading_weights(path: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a safetensors file, or damaged: {error}; copy or train it again"
        ) from error


def _read_tokenizer(directory: Path, config: TransformerConfig) -> Tokenizer | None:
    path = directory / TOKENIZER_NAME
    if config.architecture == "vision-encoder":
        return None
    if not path.is_file():
        raise CheckpointError(
            f"{directory} has no {TOKENIZER_NAME}, which {config.architecture} needs"
        )
    return _read_tokenizer_of(path, config.source_vocab_size or config.vocab_size)


def _read_tokenizer_of(path: Path, vocab_size: int) -> Tokenizer:
    try:
        return read_tokenizer_file(path, vocab_size).tokenizer
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a tokenizer of this model: {error}; "
            "give the tokenizer that the model was trained with"
        ) from error


def _read_text(directory: Path, config: TransformerConfig) -> TextFiles:
    target, chat = directory / TARGET_TOKENIZER_NAME, directory / CHAT_NAME
    try:
        return TextFiles(
            _read_tokenizer_of(target, config.vocab_size) if target.exists() else None,
            read_chat_format(chat) if chat.exists() else None,
        )
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{chat} cannot be read: {error}; import the model again") from error


def _read_samples(directory: Path) -> tuple[str, ...]:
    path = directory / SAMPLES_NAME
    if not path.exists():
        return ()
    try:
        return _Samples.model_validate(parse_object(read_bounded(path, _MAX_SAMPLES_BYTES))).texts
    except (ValueError, OSError) as error:  # pydantic's is a ValueError too
        raise CheckpointError(
            f"{path} is not a list of sentences: {error}; remove it, or train the model again"
        ) from error
