"""Imports a local directory of Hugging Face Transformers as a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from engine.errors import CheckpointError
from engine.json_file import parse_object, read_bounded
from engine.requests.generation_defaults import GenerationDefaults
from engine.wording import listed, shortened
from exporter.checkpoint import (
    CONFIG_NAME,
    CheckpointConfig,
    ModelWeight,
    check_layers,
    check_replaceable,
    model_weights,
    stream_checkpoint,
)
from exporter.huggingface.families import FAMILIES
from exporter.huggingface.family import Family
from exporter.huggingface.fitting import FoundWeight, find_weights, untie_stored_output
from exporter.huggingface.generation import merge_options
from exporter.huggingface.sentences import SentenceModules, read_modules
from exporter.huggingface.stored import StoredWeights, open_weights
from exporter.huggingface.tokenizers import ImportedTokenizer, Languages, read_tokenizer
from exporter.models import TransformerConfig

GENERATION_NAME = "generation_config.json"
_MAX_JSON_BYTES = 2**24
_MOST_CHARS = 100  # of a wrong value

Progress = Callable[[int, int], None]  # weights that are written, and all of them


@dataclass(frozen=True)
class Imported:
    """What was imported, and what a person should know of it."""

    model_type: str
    num_parameters: int
    notes: tuple[str, ...]


def import_checkpoint(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    progress: Progress = lambda done, total: None,
    *,
    languages: Languages = Languages(),  # noqa: B008
    max_len: int | None = None,
) -> Imported:
    """Write the model in the directory `source` to `out` as a checkpoint.

    The checkpoint is named for `out`. Weights are read and written one by one. No code of the
    source is run. `languages` are those of a translation model, else what the source says. Texts
    have up to `max_len` tokens, or as many as the source allows. Raises CheckpointError, and then
    writes nothing, if the directory is incomplete, or the model has options that the shared blocks
    do not have.
    """
    source, out = Path(source), Path(out)
    check_replaceable(out)
    raw, family = _read_source(source)
    with _naming(source / GENERATION_NAME):
        options = merge_options(raw, _read_optional_json(source / GENERATION_NAME))
    with _naming(source / CONFIG_NAME):
        config, said = family.read_config(raw, options.special_tokens())
        config = _with_ends(config, options.eos_token_ids)
        config = config if max_len is None else _with_length(config, max_len)
    text = ImportedTokenizer()  # of a model that sees pictures
    if config.vocab_size:
        text = read_tokenizer(source, config, str(raw["model_type"]), languages)
    config = _started(config, text)
    with _naming(source / GENERATION_NAME):
        generation = _in_language(options.defaults(config), text)
    _check_ids(config, generation, source)
    with open_weights(source, *_beside(source, raw["modules"])) as stored:
        check_layers(len(stored), config, source)
        config = untie_stored_output(stored, family, config)
        found = find_weights(stored, family, config, source)
        weights = _written(model_weights(config), found, stored, progress)
        described = CheckpointConfig(task=out.resolve().name, model=config, generation=generation)
        stream_checkpoint(out, described, text.tokenizer, weights, text.files)
    num_parameters = sum(prod(weight.shape) for weight in model_weights(config))
    said = [*options.notes(config), *said, *text.notes]
    return Imported(str(raw["model_type"]), num_parameters, tuple(said))


def _started(config: TransformerConfig, text: ImportedTokenizer) -> TransformerConfig:
    """Return a model whose outputs start with the target's language, if they are told it so."""
    if text.target_language is None or not text.starts_with_language:
        return config
    return config.model_copy(update={"bos_token_id": text.target_language})


def _in_language(defaults: GenerationDefaults, text: ImportedTokenizer) -> GenerationDefaults:
    """Return defaults by which the first token is the target's language, if they are told it so."""
    if text.target_language is None or text.starts_with_language:
        return defaults
    return defaults.model_copy(update={"forced_begin": (text.target_language,)})


def _with_length(config: TransformerConfig, max_len: int) -> TransformerConfig:
    """Return a model of other texts, whose positions are computed, so that none is left over.

    They are not longer than in the source, unless only distances count.
    """
    if config.positions == "learned":
        raise CheckpointError(
            f"max_len is {max_len}, and this model has learned its {config.max_target_len} "
            "positions; import it with all of them"
        )
    is_free = config.positions == "relative"
    lengths = {
        name: max_len if is_free else min(getattr(config, name), max_len)
        for name in ("max_source_len", "max_target_len")
    }
    return TransformerConfig.model_validate({**config.model_dump(), **lengths})


def _written(
    wanted: Sequence[ModelWeight],
    found: Sequence[FoundWeight],
    stored: StoredWeights,
    progress: Progress,
) -> Iterator[Tensor]:
    """Yield the weights that are wanted, each read when it is asked for."""
    known = {weight.name: weight for weight in found}
    for i, weight in enumerate(wanted):
        read = known[weight.name].read(stored) if weight.name in known else None
        yield torch.zeros(weight.shape) if read is None else read
        progress(i + 1, len(wanted))


def _beside(source: Path, modules: SentenceModules | None) -> list[Path]:
    """Return the directories that have weights besides the source itself."""
    return [source / modules.dense_path] if modules and modules.dense_path else []


def _read_source(source: Path) -> tuple[dict[str, Any], Family[Any]]:
    """Return `config.json` with the other files that the family reads, and the family."""
    raw = _read_json(source / CONFIG_NAME)
    family = _family_of(raw, source)
    for name in family.files:
        raw[Path(name).stem] = _read_optional_json(source / name)
    raw["modules"] = read_modules(source)
    return raw, family


def _family_of(raw: dict[str, Any], source: Path) -> Family[Any]:
    given = raw.get("model_type")
    known = {name: family for family in FAMILIES for name in family.model_types}
    if not isinstance(given, str) or given not in known:
        raise CheckpointError(
            f"{source / CONFIG_NAME}: model_type is {shortened(str(given))}; "
            f"supported: {', '.join(known)}; any other model can be built from the blocks of "
            "exporter/models, or exported as a class of your own: exporter/README.md says how"
        )
    return known[given]


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(
            f"{path.parent} has no {path.name}; give a directory written by "
            "`model.save_pretrained(DIR)` and `tokenizer.save_pretrained(DIR)`"
        )
    try:
        return parse_object(read_bounded(path, _MAX_JSON_BYTES))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is no JSON object: {error}; save the model again") from error


def _read_optional_json(path: Path) -> dict[str, Any] | None:
    return _read_json(path) if path.exists() else None


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn what pydantic finds wrong into a CheckpointError that names the file."""
    try:
        yield
    except ValidationError as error:
        raise CheckpointError(f"{path}: {_problems(error)}") from error


def _problems(error: ValidationError) -> str:
    """Say of every option that is wrong what it is and what it may be."""
    problems = []
    for found in error.errors(include_url=False):
        name, given = shortened(".".join(map(str, found["loc"]))), _beginning(found["input"])
        if found["type"] == "literal_error":
            problems.append(f"{name} is {given}; supported: {found['ctx']['expected']}")
        elif found["type"] == "none_required":
            problems.append(f"{name} is not supported; save the model without it")
        elif found["type"] == "missing":
            problems.append(f"{name} is missing")
        elif found["type"] == "value_error":
            problems.append(found["msg"].removeprefix("Value error, "))
        else:
            problems.append(f"{name} is {given}: {found['msg']}")
    return listed(problems, "; ")


def _beginning(value: object) -> str:
    """Return so much of a value that what is wrong with it has room behind."""
    text = shortened(repr(value))
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}..."


def _with_ends(config: TransformerConfig, ends: Sequence[int]) -> TransformerConfig:
    """Return the configuration with all tokens that end a sequence; ValidationError as of it."""
    if len(ends) < 2 or not config.num_decoder_layers:
        return config
    changed = {**config.model_dump(), "other_eos_token_ids": tuple(dict.fromkeys(ends[1:]))}
    return TransformerConfig.model_validate(changed)


def _check_ids(config: TransformerConfig, defaults: GenerationDefaults, source: Path) -> None:
    outside = [
        f"{name} {largest}"
        for name, largest in defaults.largest_ids.items()
        if largest >= config.vocab_size
    ]
    if outside:
        raise CheckpointError(
            f"{source}: {listed(outside)} is not in the vocabulary, whose ids are 0 to "
            f"{config.vocab_size - 1}; correct it in {GENERATION_NAME} or {CONFIG_NAME}"
        )
