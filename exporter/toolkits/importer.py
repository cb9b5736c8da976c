"""Imports a checkpoint of OpenNMT-py or fairseq."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from engine.errors import CheckpointError
from engine.package.recognised import recognise
from engine.wording import listed
from exporter.checkpoint import CONFIG_NAME, check_replaceable
from exporter.huggingface.conversion import NameTable, more_rows
from exporter.huggingface.family import Family, Original
from exporter.huggingface.understood import understood
from exporter.huggingface.weights.stored import refuse_nested, stored_weights
from exporter.huggingface.writing import (
    Imported,
    length_notes,
    naming,
    with_length,
    write_model,
)
from exporter.models import TransformerConfig
from exporter.progress import Progress, no_progress
from exporter.toolkits.fairseq import is_fairseq, read_fairseq
from exporter.toolkits.opennmt import is_opennmt, read_opennmt
from exporter.toolkits.original import ToolkitModel
from exporter.toolkits.tokenizers import Cut, find_cutters, make_tokenizers
from exporter.toolkits.torch_file import read_torch_file

_NAMES = ("checkpoint_best.pt", "checkpoint_last.pt", "model.pt")  # fairseq's; the first counts
_OF_HUGGING_FACE = (
    "of a model of Hugging Face give the directory that holds its config.json, tokenizer and "
    "weights"
)


def is_toolkit_checkpoint(path: Path) -> bool:
    """Say whether a path is of a file, or of a directory with files, that a toolkit saves."""
    if path.is_file():
        return True
    return not (path / CONFIG_NAME).exists() and any(path.glob("*.pt"))


def import_toolkit_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    progress: Progress = no_progress,
    *,
    max_len: int | None = None,
    codes: Path | None = None,
) -> Imported:
    """Write the model of OpenNMT-py or fairseq at `path` to `out` as a checkpoint.

    `path` is a file, or a directory with one. Weights are read and written one by one, and
    nothing of the file is run. `codes` are those of subword-nmt, else what lies beside the file
    cuts words. Texts have up to `max_len` tokens, or as many as the original allows. Raises
    CheckpointError, and then writes nothing, for a file that is damaged, and for options that the
    shared blocks do not have.
    """
    path, out = _file_of(Path(path)), Path(out)
    check_replaceable(out)
    found = _read(path)
    with naming(path):
        original = Original(found.options, found.tokens)
        config, notes = found.family.read_config(original), found.family.notes(original)
        length = max_len or found.usual_len
        config = config if length is None else with_length(config, length)
    cutters = find_cutters(path.parent, codes)
    cut = make_tokenizers(found.source_words, found.target_words, cutters)
    with naming(path):
        config, family = _with_more_words(config, found, cut)
    stored = stored_weights(found.weights)
    num_parameters = write_model(
        out, path, family, config, cut.text, found.generation, stored, progress
    )
    notes = [*notes, *length_notes(config, max_len), *cut.text.notes]
    told = understood(family.title, config, cut.text)
    return Imported(found.name, num_parameters, tuple(notes), told)


def _file_of(path: Path) -> Path:
    """Return the file that is given, or the one of a directory."""
    if problem := recognise(path).problem("original"):
        raise CheckpointError(problem)
    if path.is_file():
        return path
    there = sorted(file.name for file in path.glob("*.pt"))
    known = [name for name in _NAMES if name in there] or there
    if not known or (len(known) > 1 and known[0] not in _NAMES):
        raise CheckpointError(
            f"{path} has {listed(there) or 'no file that ends with .pt'}; give the path of one "
            "checkpoint"
        )
    return path / known[0]


def _read(path: Path) -> ToolkitModel:
    content = read_torch_file(path)
    try:
        if is_opennmt(content):
            return read_opennmt(path, content)
        if is_fairseq(content):
            return read_fairseq(path, content)
    except RecursionError as error:
        raise CheckpointError(
            f"{path}: its options are nested too deeply; save the model again"
        ) from error
    refuse_nested(content, path)
    raise CheckpointError(
        f"{path} has {listed(list(map(str, content))) or 'nothing'}; a checkpoint of OpenNMT-py "
        "has model, generator, opt and vocab, one of fairseq has model, and args or cfg; "
        f"{_OF_HUGGING_FACE}"
    )


def _with_more_words(
    config: TransformerConfig, found: ToolkitModel, cut: Cut
) -> tuple[TransformerConfig, Family]:
    """Return a model that reads pieces without an id as unknown words, each with a row for it."""
    if not cut.num_more:
        return config, found.family
    size = len(found.source_words) + cut.num_more
    changed = config.changed({"source_vocab_size": size, "share_embeddings": False})
    unknown = found.source_words.ids[found.source_words.unknown]
    name, more = "source_embeddings.token.weight", more_rows(unknown, cut.num_more)

    def weights(one: TransformerConfig) -> NameTable:
        table = found.family.weights(one)
        entry = table[name]
        return {**table, name: replace(entry, steps=(*entry.steps, more))}

    return changed, replace(found.family, weights=weights)
