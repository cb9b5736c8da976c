"""Imports a local directory of Hugging Face Transformers as a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.package.recognised import recognise
from engine.requests.generation_defaults import GenerationDefaults
from engine.wording import listed
from exporter.checkpoint import CONFIG_NAME, CheckpointConfig, check_replaceable, stream_checkpoint
from exporter.huggingface.any_decoder import TITLE, OriginalDecoder
from exporter.huggingface.family import Original
from exporter.huggingface.generation import about_tasks, read_options
from exporter.huggingface.reading import family_of, read_config, read_json, read_processor
from exporter.huggingface.sentences import read_modules, read_sentence_texts
from exporter.huggingface.tokenizers import ImportedTokenizer, Languages, read_tokenizer
from exporter.huggingface.understood import understood
from exporter.huggingface.weights.fitting import without_wrappers
from exporter.huggingface.weights.stored import open_weights
from exporter.huggingface.writing import (
    Imported,
    length_notes,
    naming,
    prompt_notes,
    with_length,
    write_model,
)
from exporter.models import TransformerConfig
from exporter.progress import Progress, no_progress

GENERATION_NAME = "generation_config.json"


def import_checkpoint(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    progress: Progress = no_progress,
    *,
    languages: Languages = Languages(),
    max_len: int | None = None,
) -> Imported:
    """Write the model in `directory` to `out` as a checkpoint.

    The checkpoint is named for `out`. Weights are read and written one by one. No code of the
    original is run. `languages` are those of a translation model, else what the original says.
    Texts have up to `max_len` tokens, or as many as the original allows. Raises CheckpointError,
    and then writes nothing, if the directory is incomplete, or the model has options that the
    shared blocks do not have.
    """
    directory, out = Path(directory), Path(out)
    check_replaceable(out)
    if problem := recognise(directory).problem("original"):
        raise CheckpointError(problem)
    said = read_json(directory / CONFIG_NAME)
    family = family_of(said, directory)
    generation_path = directory / GENERATION_NAME
    generation_config = read_json(generation_path) if generation_path.exists() else None
    if family is None:
        return _import_by_own_code(directory, said, generation_config, out, progress, max_len)
    with naming(generation_path):
        options = read_options(said, generation_config, generation_path)
    with naming(directory / CONFIG_NAME, family.options):
        original = Original(
            config=read_config(said, directory / CONFIG_NAME),
            tokens=options.special_tokens(),
            said=said,
            asked_len=max_len,
            modules=read_modules(directory),
            texts=read_sentence_texts(directory, said),
            pictures=read_processor(directory, str(said["model_type"]))
            if family.fixed["architecture"] == "vision-encoder"
            else None,
        )
        config = _with_ends(family.read_config(original), options.eos_token_ids)
        config = _as_read(config, original, max_len)
        family_notes = family.notes(original)
    text = ImportedTokenizer()  # none, of one that sees pictures
    if config.vocab_size:
        text = read_tokenizer(directory, config, languages)
        if original.texts is not None and original.texts.lowers:
            text.lower()
    with naming(generation_path):
        config, generation = _with_text(config, options.defaults(config), text)
    _check_ids(config, generation, directory)
    dense = original.modules and original.modules.dense_path
    with open_weights(directory, *([directory / dense] if dense else [])) as stored:
        stored, unwrapped = without_wrappers(stored, family.weights(config), family)
        num_parameters = write_model(
            out, directory, family, config, text, generation, stored, progress
        )
    notes = ["code beside the model (auto_map) is not run"] if said.get("auto_map") else []
    notes += [*options.notes(config), *about_tasks(said, generation_config), *family_notes]
    notes += [*length_notes(config, max_len), *text.notes, *unwrapped]
    if original.texts is not None:
        notes += [*original.texts.notes, *prompt_notes(config, original.texts)]
    told = understood(family.title, config, text)
    return Imported(str(said["model_type"]), num_parameters, tuple(notes), told)


def _import_by_own_code(
    directory: Path,
    said: dict[str, Any],
    generation_config: dict[str, Any] | None,
    out: Path,
    progress: Progress,
    max_len: int | None,
) -> Imported:
    """Do as `import_checkpoint` for a decoder for which no family stands."""
    with open_weights(directory) as stored:
        original = OriginalDecoder(directory, said, stored)
    generation_path = directory / GENERATION_NAME
    with naming(generation_path):
        options = read_options(original.options, generation_config, generation_path)
    with naming(directory / CONFIG_NAME):
        config = original.config(options.special_tokens(), max_len)
        config = _with_ends(config, options.eos_token_ids)
    text = read_tokenizer(directory, config)
    with naming(generation_path):
        generation = options.defaults(config)
    _check_ids(config, generation, directory)
    described = CheckpointConfig(task=out.resolve().name, model=config, generation=generation)
    weights = original.weights(config, progress)
    stream_checkpoint(out, described, text.tokenizer, weights, text.files)
    notes = [*options.notes(config), *about_tasks(said, generation_config)]
    notes += [*length_notes(config, max_len), *text.notes]
    told = understood(TITLE, config, text)
    return Imported(str(said["model_type"]), original.num_parameters, tuple(notes), told)


def _as_read(config: TransformerConfig, original: Original, asked: int | None) -> TransformerConfig:
    """Return a model of texts as long as was asked for.

    sentence-transformers cuts longer ones, and puts prompts in front of those it makes vectors of.
    """
    texts, modules = original.texts, original.modules
    if texts is not None and config.is_of_texts:
        limit = min(asked or texts.limit or config.max_source_len, config.max_source_len)
        read: dict[str, Any] = {"cut_at": limit}
        if not config.labels and modules is not None and modules.pools_prompts:
            read |= {"prompts": texts.prompts, "default_prompt": texts.default_prompt}
        return config.changed(read)
    return config if asked is None else with_length(config, asked)


def _with_text(
    config: TransformerConfig, generation: GenerationDefaults, text: ImportedTokenizer
) -> tuple[TransformerConfig, GenerationDefaults]:
    """Return both with what the tokenizer tells.

    Answers begin behind the target's language, or with it, if they are told it so, and a text that
    is cut keeps the end that transformers keeps.
    """
    if config.cut_at is not None:
        config = config.model_copy(update={"cuts_left": text.cuts_left})
    if text.target_language is None:
        return config, generation
    if text.starts_with_language:
        return config.model_copy(update={"bos_token_id": text.target_language}), generation
    return config, generation.model_copy(update={"forced_begin": (text.target_language,)})


def _with_ends(config: TransformerConfig, ends: Sequence[int]) -> TransformerConfig:
    """Return the configuration with all tokens that end a sequence; ValidationError as of it."""
    if len(ends) < 2 or not config.num_decoder_layers:
        return config
    return config.changed({"other_eos_token_ids": tuple(dict.fromkeys(ends[1:]))})


def _check_ids(config: TransformerConfig, defaults: GenerationDefaults, directory: Path) -> None:
    outside = [
        f"{name} {largest}"
        for name, largest in defaults.largest_ids.items()
        if largest >= config.vocab_size
    ]
    if outside:
        raise CheckpointError(
            f"{directory}: {listed(outside)} is not in the vocabulary, whose ids are 0 to "
            f"{config.vocab_size - 1}; correct it in {GENERATION_NAME} or {CONFIG_NAME}"
        )
