"""Reads what an original says of its model: strangers' files by us first, then by transformers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.json_file import parse_object, read_bounded
from engine.package.manifest import MAX_HEADS, MAX_LAYERS
from engine.wording import shortened
from exporter.checkpoint import CONFIG_NAME
from exporter.huggingface.families import FAMILIES
from exporter.huggingface.family import Family
from exporter.huggingface.pictures import PREPROCESSOR_NAME

_MAX_JSON_BYTES, _MAX_KEYS = 2**24, 2**12  # transformers looks at each
_NUMBERS = range(-(2**53), 2**53)  # that an option may be
_COUNTS = {  # by which transformers divides, or makes lists that are as long
    "num_attention_heads": range(1, MAX_HEADS + 1),
    "num_hidden_layers": range(1, MAX_LAYERS + 1),
    "num_labels": range(2**20 + 1),
}
# The first says nothing beside the second: a distilled model may have its teacher's number of
# layers, and labels are counted by their names.
_BEHIND = {"num_hidden_layers": "encoder_layers", "num_labels": "id2label"}
_WRITERS = ("ForCausalLM", "LMHeadModel")  # how classes end that write, and read nothing but texts
_ADAPTER_NAME = "adapter_config.json"
_PROCESSOR_NAME = "processor_config.json"


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of a stranger; CheckpointError if it is none, or too large."""
    try:
        found = parse_object(read_bounded(path, _MAX_JSON_BYTES))
        if len(found) > _MAX_KEYS:
            raise ValueError(f"it has {len(found):,} keys, more than {_MAX_KEYS:,}")
        return found
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{path} is not a JSON object: {error}; save the model again"
        ) from error


def family_of(said: dict[str, Any], directory: Path) -> Family | None:
    """Return the family of what `config.json` says; None: its own code computes it.

    CheckpointError if it is none of ours, or needs more than its configuration and weights.
    """
    path, given = directory / CONFIG_NAME, said.get("model_type")
    known = {name: family for family in FAMILIES for name in family.model_types}
    if given is None:
        raise CheckpointError(
            f"{path} has no model_type, as files of early BERTs have none; "
            f"add the one that it is: {', '.join(known)}"
        )
    is_known = isinstance(given, str) and given in known
    if not is_known and not _is_any_decoder(said, path):
        why = "code beside a model (auto_map) is never run; " if said.get("auto_map") else ""
        classes = said.get("architectures")
        named = f" (here {shortened(classes)})" if classes else ""
        raise CheckpointError(
            f"{path}: model_type is {shortened(str(given))}; {why}"
            f"supported: {', '.join(known)}, and causal models whose class of transformers takes "
            f"an attention function{named}; any other model can be built from the blocks of "
            "exporter/models, or exported as a class of your own: "
            "exporter/docs/how-to/own-class.md says how"
        )
    if said.get("quantization_config") is not None:
        config = said["quantization_config"]
        method = config.get("quant_method") if isinstance(config, dict) else None
        raise CheckpointError(
            f"{path}: quantization_config is not supported: the weights are rounded "
            f"({shortened(method or 'by a method that it does not name')}); give the model that "
            "they were made of"
        )
    if (directory / _ADAPTER_NAME).exists():
        raise CheckpointError(
            f"{directory} has an adapter ({_ADAPTER_NAME}), which is not applied; give the model "
            "with the adapter in it: `AutoPeftModel.from_pretrained(DIR).merge_and_unload()"
            ".save_pretrained(OTHER)`"
        )
    return known[str(given)] if is_known else None


def _is_any_decoder(said: dict[str, Any], path: Path) -> bool:
    """Say whether a model is of a causal class that takes an attention function."""
    given = said.get("model_type")
    with reading_by_transformers(path) as transformers:
        if said.get("auto_map") or not isinstance(given, str):
            return False
        if given not in transformers.CONFIG_MAPPING:
            return False
        kinds = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        made = kinds.get(transformers.CONFIG_MAPPING[given], None)
        return (
            isinstance(made, type)
            and made.__name__.endswith(_WRITERS)
            and said.get("architectures") in (None, [], [made.__name__])
            and bool(made.is_backend_compatible())  # type: ignore[attr-defined]
        )


def read_config(said: dict[str, Any], path: Path) -> Any:
    """Return the configuration of transformers that the options in a file are."""
    unheard = {name for name, other in _BEHIND.items() if said.get(other) is not None}
    said = {name: value for name, value in said.items() if name not in unheard}
    with reading_by_transformers(path) as transformers:
        kind = transformers.CONFIG_MAPPING[said["model_type"]]
        for name, value in said.items():
            of_all = next((k for k, v in kind.attribute_map.items() if v == name), name)
            known = _COUNTS.get(of_all, _NUMBERS)
            if isinstance(value, int) and value not in known:
                supported = f"supported: {known[0]:,} to {known[-1]:,}"
                raise CheckpointError(f"{path}: {name} is {shortened(value)}; {supported}")
            if callable(getattr(kind, name, None)) or name == "attribute_map":
                raise CheckpointError(f"{path}: {shortened(name)} is no option of a model")
        for second, name in kind.attribute_map.items():
            if name in said and second in said and said[name] != said[second]:
                raise CheckpointError(
                    f"{path}: {name} is {shortened(said[name])} and {second} "
                    f"{shortened(said[second])}; they are two names of one option: give one of them"
                )
        config = transformers.AutoConfig.for_model(**deepcopy(said))
        if hasattr(config, "rope_parameters"):
            config.standardize_rope_params()  # once more, as a model does
        return config


def read_processor(directory: Path, model_type: str) -> Any:
    """Return the image processor of transformers that a directory has; None if it has none."""
    paths = [directory / name for name in (PREPROCESSOR_NAME, _PROCESSOR_NAME)]
    found = {path: read_json(path) for path in paths if path.exists()}  # transformers reads both
    if (said := found.get(path := paths[0])) is None:
        return None
    kind = said.get("image_processor_type", said.get("feature_extractor_type", model_type))
    with reading_by_transformers(path) as transformers:
        is_deit = str(kind).lower().startswith("deit")
        name = "DeiTImageProcessorPil" if is_deit else "ViTImageProcessorPil"
        return getattr(transformers, name).from_dict(said)


@contextmanager
def reading_by_transformers(path: Path) -> Iterator[Any]:
    """Give transformers, silent; what it raises of the file at `path` is told in one line."""
    if find_spec("transformers") is None:
        raise CheckpointError(
            "a model of Hugging Face is imported with transformers, which is not installed: "
            "pip install 'tokenweir[import]'"
        )
    try:
        with silent_transformers() as transformers:
            yield transformers
    except CheckpointError:
        raise
    except Exception as error:
        reason = error.__cause__ or error
        said = shortened(" ".join(str(reason.args[0] if reason.args else reason).split()))
        raise CheckpointError(f"{path}: transformers does not read it: {said}") from error


@contextmanager
def silent_transformers() -> Iterator[Any]:
    """Give transformers; its verbosity is restored behind the block."""
    import transformers

    logging = transformers.utils.logging
    verbosity, shows_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield transformers
    finally:
        logging.set_verbosity(verbosity)
        if shows_bars:
            logging.enable_progress_bar()
