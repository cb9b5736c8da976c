"""Lets transformers read the tokenizer of a directory, of which nothing is run or fetched.

Transformers is shown copies of the files that it opens, each of a bounded size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from engine.json_file import parse_object, read_bounded
from engine.text.chat_format import MAX_TEMPLATE_CHARS
from engine.text.tokenizer_file import MAX_BYTES, MAX_TOKEN_CHARS, parse_tokenizer
from engine.wording import listed, shortened
from exporter.checkpoint import CONFIG_NAME, TOKENIZER_NAME
from exporter.files import scratch_directory
from exporter.huggingface.reading import silent_transformers
from exporter.huggingface.tokenizers.sentencepiece_model import read_sentencepiece

SETTINGS_NAME = "tokenizer_config.json"
_TEMPLATE_NAME = "chat_template.jinja"
_OBJECTS = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "target_vocab.json")
_LINES = ("merges.txt", "vocab.txt", _TEMPLATE_NAME)
_BESIDES = {*_OBJECTS[:2], _TEMPLATE_NAME}  # that say nothing without another file
_ANY_MODEL = "tokenizer.model"  # the name that transformers looks for, whatever the class is
_MODELS = ("spiece.model", _ANY_MODEL, "sentencepiece.bpe.model", "source.spm", "target.spm")
_MOST_BYTES = {SETTINGS_NAME: 2**24, CONFIG_NAME: 2**24, _TEMPLATE_NAME: 4 * MAX_TEMPLATE_CHARS}
_VOCABULARY_BYTES = 2**26
_FROM_CONFIG = ("model_type", "tokenizer_class", "transformers_version")  # that say how to read
_COUNTS = ("extra_ids", "offset")  # numbers of tokens that a class adds
_AGAIN = (
    "save it again with transformers: `AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`"
)


class Original(NamedTuple):
    """A tokenizer of transformers, and what to know of its files."""

    tokenizer: Any
    settings: Mapping[str, Any]
    left_out: list[str]  # added tokens of tokenizer.json that the model has no room for
    algorithm: str  # that its file cuts texts by, as the library names it; "": not known
    is_old: bool  # it has no tokenizer.json


def load_original(directory: Path, room: int) -> Original:
    """Load the tokenizer of a model of so many ids, as AutoTokenizer loads it.

    Raises ValueError, which says what is wrong, for whatever transformers refuses.
    """
    settings = _read_settings(directory, room)
    named = _read_object(directory / CONFIG_NAME)
    with scratch_directory("import") as staged:
        algorithm, left_out = _copy(directory, staged, room)
        there = {path.name for path in staged.iterdir()}
        told = {name: named[name] for name in _FROM_CONFIG if name in named}
        for name, content in ((SETTINGS_NAME, settings), (CONFIG_NAME, told)):
            (staged / name).write_text(json.dumps(content))
        try:
            with silent_transformers() as transformers:
                tokenizer = transformers.AutoTokenizer.from_pretrained(
                    staged, local_files_only=True, trust_remote_code=False
                )
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises panics, which are not Exception
            said = " ".join(str(error).split()).replace(str(staged), str(directory))
            said = f"it lacks {said}" if isinstance(error, KeyError) else said
            said = f"transformers reads none: {shortened(said)}"
            said = f"there is no {TOKENIZER_NAME}" if there <= _BESIDES else said
            raise ValueError(f"{said}; {_AGAIN}") from error
    wanted = {TOKENIZER_NAME, _ANY_MODEL, *tokenizer.vocab_files_names.values()}
    if tokenizer.is_fast and not there & wanted:  # classes make one of no more than special tokens
        kind = type(tokenizer).__name__
        raise ValueError(f"there is no file for its {kind}, {listed(sorted(wanted))}; {_AGAIN}")
    return Original(tokenizer, settings, left_out, algorithm, TOKENIZER_NAME not in there)


def _read_settings(directory: Path, room: int) -> dict[str, Any]:
    """Return the settings, but for names of files, which may lie elsewhere."""
    found = _read_object(directory / SETTINGS_NAME)
    if "auto_map" in found:
        raise ValueError(
            f"{SETTINGS_NAME} has auto_map: its tokenizer is code, which is not run; take auto_map "
            "out if its tokenizer_class is one of transformers"
        )
    for name in _COUNTS:
        if isinstance(found.get(name), int) and found[name] > room:
            raise ValueError(
                f"{SETTINGS_NAME}: {name} is {found[name]}, the model has a vocabulary of {room}"
            )
    without = ("init_inputs", "sp_model_kwargs")
    return {n: v for n, v in found.items() if n not in without and not n.endswith("_file")}


def _copy(directory: Path, staged: Path, room: int) -> tuple[str, list[str]]:
    """Copy files of bounded size; return the algorithm of the vocabulary, and tokens left out."""
    algorithm, left_out = "", list[str]()
    has_file = (directory / TOKENIZER_NAME).is_file()
    if has_file:
        raw, left_out = _read_file(directory / TOKENIZER_NAME, room)
        (staged / TOKENIZER_NAME).write_bytes(raw)
        algorithm = str(json.loads(raw)["model"].get("type") or "")
    for path in (directory / name for name in (*_OBJECTS, *_LINES)):
        if path.is_file():
            raw = _read(path)
            if path.name in _OBJECTS:
                _parse(path.name, raw)
            (staged / path.name).write_bytes(raw)
    for path in (directory / name for name in _MODELS):
        if path.is_file():
            try:
                model = read_sentencepiece(path)
            except ValueError:
                if has_file:  # then transformers does not open it
                    continue
                raise
            algorithm = algorithm or {"unigram": "Unigram", "bpe": "BPE"}.get(model.algorithm, "")
            (staged / path.name).write_bytes(path.read_bytes())
    return algorithm, left_out


def _read_file(path: Path, room: int) -> tuple[bytes, list[str]]:
    """Read a `tokenizer.json`; added tokens that the model has no room for are left out."""
    try:
        raw = read_bounded(path, MAX_BYTES)
        content = parse_object(raw)
        added = content.get("added_tokens")
        added = added if isinstance(added, list) else []
        ids = [token.get("id") if isinstance(token, dict) else None for token in added]
        over = [t for i, t in zip(ids, added, strict=True) if isinstance(i, int) and i >= room]
        if over:
            content["added_tokens"] = [token for token in added if token not in over]
            raw = json.dumps(content).encode()
        parse_tokenizer(raw, room)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    return raw, [str(token.get("content")) for token in over]


def _read(path: Path) -> bytes:
    try:
        return read_bounded(path, _MOST_BYTES.get(path.name, _VOCABULARY_BYTES))
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    return _parse(path.name, _read(path)) if path.is_file() else {}


def _parse(name: str, raw: bytes) -> dict[str, Any]:
    try:
        found = parse_object(raw)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    named = [value for key, value in found.items() if key.endswith("_token")]
    named = [value.get("content") if isinstance(value, dict) else value for value in named]
    longest = max((len(text) for text in (*found, *named) if isinstance(text, str)), default=0)
    if longest > MAX_TOKEN_CHARS:
        raise ValueError(
            f"{name}: it has a token of {longest:,} characters, more than {MAX_TOKEN_CHARS:,}"
        )
    return found
