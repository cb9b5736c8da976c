"""Writes a model that was read from an original as a checkpoint, weight by weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from math import prod
from pathlib import Path

from pydantic import ValidationError
from torch import Tensor

from engine.errors import CheckpointError
from engine.requests.generation_defaults import GenerationDefaults
from engine.wording import listed, problems_of, shortened
from exporter.checkpoint import (
    CheckpointConfig,
    check_layers,
    stream_checkpoint,
)
from exporter.huggingface.family import Family
from exporter.huggingface.sentences import SentenceTexts
from exporter.huggingface.tokenizers import ImportedTokenizer
from exporter.huggingface.weights.fitting import (
    find_weights,
    rounded_as_stored,
    untied_as_stored,
)
from exporter.huggingface.weights.stored import StoredWeights
from exporter.models import TransformerConfig
from exporter.progress import Progress


@dataclass(frozen=True)
class Imported:
    """An imported model, and remarks for a person."""

    model_type: str
    num_parameters: int
    notes: tuple[str, ...]
    understood: Mapping[str, str]  # the parts that were taken over, in words, by kind


def write_model(
    out: Path,
    original: Path,
    family: Family,
    config: TransformerConfig,
    text: ImportedTokenizer,
    generation: GenerationDefaults,
    stored: StoredWeights,
    progress: Progress,
) -> int:
    """Write a checkpoint named for `out`, and return how many parameters it has.

    Raises CheckpointError, and then writes nothing, if weights are missing or do not fit.
    """
    check_layers(len(stored), config, original)
    config = untied_as_stored(stored, family, rounded_as_stored(stored, config))
    found = find_weights(stored, family, config, original)
    named = ((one.stored or one.name, one.read(stored)) for one in found)
    weights = finite(named, len(found), progress, original)
    described = CheckpointConfig(task=out.resolve().name, model=config, generation=generation)
    stream_checkpoint(out, described, text.tokenizer, weights, text.files)
    return sum(prod(weight.shape) for weight in found)


def finite(
    weights: Iterable[tuple[str, Tensor]], total: int, progress: Progress, directory: Path
) -> Iterator[Tensor]:
    """Yield weights that come with their names, each made when it is asked for.

    Behind the last one CheckpointError names all that are not finite.
    """
    wrong, done = [], count(1)
    for name, weight in weights:  # enumerate would hold on to a weight while the next one is read
        # NaN anywhere is in both; nothing is copied of a table that is most of a model.
        if not all(bound.isfinite() for bound in weight.aminmax()):
            wrong.append(name)
        yield weight
        del weight
        progress(next(done), total, "weights")
    if wrong:
        raise CheckpointError(
            f"{directory} has weights that are not finite numbers: {listed(dict.fromkeys(wrong))}; "
            "copy or save the model again"
        )


def with_length(config: TransformerConfig, max_len: int) -> TransformerConfig:
    """Return a model of other texts: no longer than in the original, unless only distances count.

    Learned positions beyond it are left out.
    """
    if not config.vocab_size:
        raise CheckpointError(
            f"max_len is {max_len}, and this model sees pictures, not texts; leave it out"
        )
    is_free = config.positions.kind == "relative"
    lengths = {
        name: max_len if is_free else min(getattr(config, name), max_len)
        for name in ("max_source_len", "max_target_len")
    }
    return config.changed(lengths)


def prompt_notes(config: TransformerConfig, texts: SentenceTexts) -> list[str]:
    """Say what stands in front of texts."""
    if not texts.prompts:
        return []
    chosen, names = shortened(texts.default_prompt or "none"), listed(texts.prompts)
    known = f"prompts ({names}; by default {chosen})"
    if not config.prompts:
        return [f"its {known} are yours to put in front of texts"]
    return [f"{known} stand in front of texts, as in sentence-transformers; see prompt_name"]


def length_notes(config: TransformerConfig, asked: int | None) -> list[str]:
    """Say where texts are cut, or shorter than was asked for."""
    if config.cut_at is not None and asked is None:
        side = ", their beginnings off" if config.cuts_left else ""
        where = f"at {config.cut_at} tokens{side}"
        return [f"texts are cut {where}, as sentence-transformers cuts them"]
    most = max(config.max_source_len, config.max_target_len)
    if asked is None or asked <= most:
        return []
    return [f"texts may have {most} tokens, not the {asked} of --max-len: the model knows no more"]


@contextmanager
def naming(path: Path, theirs: Mapping[str, str] = {}) -> Iterator[None]:
    """Turn what is wrong with options into a CheckpointError that names the file.

    `theirs` are the names that ours have in it.
    """
    try:
        yield
    except ValidationError as error:
        raise CheckpointError(f"{path}: {problems_of(error, '', theirs)}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
