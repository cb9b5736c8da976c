"""Imports a local directory of Hugging Face Transformers as a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.json_file import parse_object, read_bounded
from engine.package.recognised import recognise
from engine.requests.generation_defaults import GenerationDefaults
from engine.wording import listed, shortened
from exporter.checkpoint import CONFIG_NAME, check_replaceable
from exporter.huggingface.families import FAMILIES, LACKING
from exporter.huggingface.family import Family
from exporter.huggingface.fitting import without_wrappers
from exporter.huggingface.generation import about_tasks, merge_options
from exporter.huggingface.sentence_texts import SentenceTexts, read_sentence_texts
from exporter.huggingface.sentences import SentenceModules, read_modules
from exporter.huggingface.stored import open_weights
from exporter.huggingface.tokenizers import ImportedTokenizer, Languages, read_tokenizer
from exporter.huggingface.tokenizers.original import need_transformers
from exporter.huggingface.understood import understood
from exporter.huggingface.writing import (
    Imported,
    Progress,
    ReadModel,
    length_notes,
    naming,
    with_length,
    write_model,
)
from exporter.models import TransformerConfig

GENERATION_NAME = "generation_config.json"
_MAX_JSON_BYTES = 2**24


def import_checkpoint(
    directory: str | os.PathLike[str],
    out: str | os.PathLike[str],
    progress: Progress = lambda done, total: None,
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
    need_transformers()
    directory, out = Path(directory), Path(out)
    check_replaceable(out)
    raw, family = _read_original(directory)
    texts: SentenceTexts | None = raw["texts"]
    generation_config = _read_optional_json(directory / GENERATION_NAME)
    with naming(directory / GENERATION_NAME):
        options = merge_options(raw, generation_config)
    with naming(directory / CONFIG_NAME):
        config, said = family.read_config({**raw, "asked_len": max_len}, options.special_tokens())
        whole = _with_ends(config, options.eos_token_ids)
        config = _with_limit(whole, texts, max_len)
    text = _read_text(directory, raw, config, languages)
    config = _as_read(config, text)
    with naming(directory / GENERATION_NAME):
        generation = _in_language(options.defaults(config), text)
    _check_ids(config, generation, directory)
    model = ReadModel(directory, family, config, whole, text, generation)
    with open_weights(directory, *_beside(directory, raw["modules"])) as stored:
        stored, unwrapped = without_wrappers(stored, family.weights(config), family)
        num_parameters = write_model(model, stored, out, progress)
    notes = [*options.notes(config), *about_tasks(raw, generation_config), *said]
    notes += [*length_notes(config, max_len), *text.notes, *unwrapped]
    notes += texts.notes if texts else []
    return Imported(str(raw["model_type"]), num_parameters, tuple(notes), understood(model))


def _with_limit(
    config: TransformerConfig, texts: SentenceTexts | None, asked: int | None
) -> TransformerConfig:
    """Return a model of texts as long as was asked for; sentence-transformers cuts longer ones."""
    if texts is not None and config.family == "bert":
        limit = min(asked or texts.limit or config.max_source_len, config.max_source_len)
        return TransformerConfig.model_validate({**config.model_dump(), "cut_at": limit})
    return config if asked is None else with_length(config, asked)


def _read_text(
    directory: Path, raw: dict[str, Any], config: TransformerConfig, languages: Languages
) -> ImportedTokenizer:
    """Return the tokenizer of a model; none of one that sees pictures."""
    if not config.vocab_size:
        return ImportedTokenizer()
    text = read_tokenizer(directory, config, languages)
    texts: SentenceTexts | None = raw["texts"]
    if texts is not None and texts.lowers:
        text.lower()
    return text


def _as_read(config: TransformerConfig, text: ImportedTokenizer) -> TransformerConfig:
    """Return a model with what its tokenizer tells.

    Its outputs start with the target's language, if they are told it so, and a text that is cut
    keeps the end that transformers keeps.
    """
    found: dict[str, Any] = {}
    if text.target_language is not None and text.starts_with_language:
        found["bos_token_id"] = text.target_language
    if config.cut_at is not None:
        found["cuts_left"] = text.cuts_left
    return config.model_copy(update=found)


def _in_language(defaults: GenerationDefaults, text: ImportedTokenizer) -> GenerationDefaults:
    """Return defaults by which the first token is the target's language, if they are told it so."""
    if text.target_language is None or text.starts_with_language:
        return defaults
    return defaults.model_copy(update={"forced_begin": (text.target_language,)})


def _beside(directory: Path, modules: SentenceModules | None) -> list[Path]:
    """Return the directories that have weights besides the original itself."""
    return [directory / modules.dense_path] if modules and modules.dense_path else []


def _read_original(directory: Path) -> tuple[dict[str, Any], Family[Any]]:
    """Return `config.json` with the other files that the family reads, and the family."""
    if problem := recognise(directory).problem("original"):
        raise CheckpointError(problem)
    raw = _read_json(directory / CONFIG_NAME)
    family = _family_of(raw, directory)
    for name in family.files:
        raw[Path(name).stem] = _read_optional_json(directory / name)
    raw["modules"] = read_modules(directory)
    with naming(directory / CONFIG_NAME):
        raw["texts"] = read_sentence_texts(directory, raw)
    return raw, family


def _family_of(raw: dict[str, Any], directory: Path) -> Family[Any]:
    given = raw.get("model_type")
    known = {name: family for family in FAMILIES for name in family.model_types}
    if given is None:
        raise CheckpointError(
            f"{directory / CONFIG_NAME} has no model_type, as files of early BERTs have none; "
            f"add the one that it is: {', '.join(known)}"
        )
    if not isinstance(given, str) or given not in known:
        lacking = LACKING.get(str(given))
        why = f"what is not supported: {lacking}; " if lacking else ""
        raise CheckpointError(
            f"{directory / CONFIG_NAME}: model_type is {shortened(str(given))}; {why}"
            f"supported: {', '.join(known)}; any other model can be built from the blocks of "
            "exporter/models, or exported as a class of your own: exporter/README.md says how"
        )
    return known[given]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return parse_object(read_bounded(path, _MAX_JSON_BYTES))
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a JSON object: {error}; save the model again"
        ) from error


def _read_optional_json(path: Path) -> dict[str, Any] | None:
    return _read_json(path) if path.exists() else None


def _with_ends(config: TransformerConfig, ends: Sequence[int]) -> TransformerConfig:
    """Return the configuration with all tokens that end a sequence; ValidationError as of it."""
    if len(ends) < 2 or not config.num_decoder_layers:
        return config
    changed = {**config.model_dump(), "other_eos_token_ids": tuple(dict.fromkeys(ends[1:]))}
    return TransformerConfig.model_validate(changed)


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
