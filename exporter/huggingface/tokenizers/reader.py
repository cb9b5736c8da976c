"""Reads the tokenizer of an original, from whichever files it has."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, normalizers

from engine.errors import CheckpointError
from engine.json_file import parse_object, read_bounded
from engine.text.tokenizer_file import MAX_BYTES, parse_tokenizer
from engine.wording import listed, shortened
from exporter.checkpoint import TOKENIZER_NAME, TextFiles
from exporter.huggingface.pointers import about_pointers
from exporter.huggingface.tokenizers.byte_level import (
    MERGES_NAME,
    VOCABULARY_NAME,
    read_bytes,
    read_gpt2,
    read_qwen2,
    read_roberta,
)
from exporter.huggingface.tokenizers.chat import read_chat
from exporter.huggingface.tokenizers.from_sentencepiece import (
    MARIAN_NAMES,
    MODEL_NAMES,
    Made,
    find_model,
    read_m2m,
    read_marian,
    read_pieces,
)
from exporter.huggingface.tokenizers.layouts import SENTENCEPIECE
from exporter.huggingface.tokenizers.settings import CONFIG_NAME, Settings, read_settings
from exporter.huggingface.tokenizers.settled import add_settled, follow_settings
from exporter.huggingface.tokenizers.translation import Translation
from exporter.huggingface.tokenizers.unsaid import UNSAID
from exporter.huggingface.tokenizers.word_piece import WORDS_NAME, read_bert
from exporter.models import TransformerConfig

# The class of tokenizer of a model whose original names none.
_CLASSES: Mapping[str, str] = {
    "bart": "BartTokenizer",
    "bert": "BertTokenizer",
    "camembert": "CamembertTokenizer",
    "distilbert": "DistilBertTokenizer",
    "gemma": "GemmaTokenizer",
    "gemma2": "GemmaTokenizer",
    "gemma3_text": "GemmaTokenizer",
    "gpt2": "GPT2Tokenizer",
    "gpt_neox": "GPTNeoXTokenizer",
    "llama": "LlamaTokenizer",
    "m2m_100": "M2M100Tokenizer",
    "marian": "MarianTokenizer",
    "mbart": "MBartTokenizer",
    "mistral": "LlamaTokenizer",
    "mt5": "T5Tokenizer",
    "opt": "GPT2Tokenizer",
    "pegasus": "PegasusTokenizer",
    "phi3": "LlamaTokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "roberta": "RobertaTokenizer",
    "t5": "T5Tokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
}
_BYTE_LEVEL: Mapping[str, Callable[[Path, Settings, int], Tokenizer]] = {
    "BartTokenizer": read_roberta,
    "GPT2Tokenizer": read_gpt2,
    "Qwen2Tokenizer": read_qwen2,
    "RobertaTokenizer": read_roberta,
}
_ANY_CLASS = ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend")
_WORD_PIECE = ("BertTokenizer", "DistilBertTokenizer")


@dataclass(frozen=True)
class Languages:
    """What `tokenweir import` was told of a translation model; None: what the original says."""

    source: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class ImportedTokenizer:
    """The tokenizer of an original, and what to know of it."""

    tokenizer: Tokenizer | None = None
    files: TextFiles = TextFiles()  # what else the checkpoint gets
    target_language: int | None = None  # the token that says what to write, if that is fixed
    starts_with_language: bool = False  # it is what the decoder starts with, else the first output
    cuts_left: bool = False  # of a text that is cut, transformers keeps the end
    notes: tuple[str, ...] = ()

    def lower(self) -> None:
        """Let all letters of a text become small before anything else is done to it."""
        assert self.tokenizer is not None, "a model that sees pictures has no letters"
        steps = [normalizers.Lowercase(), self.tokenizer.normalizer]
        self.tokenizer.normalizer = normalizers.Sequence([step for step in steps if step])


def read_tokenizer(
    directory: Path,
    config: TransformerConfig,
    model_type: str = "",
    languages: Languages = Languages(),
    *,
    named: str = "",
) -> ImportedTokenizer:
    """Return the tokenizer of a directory with a model of this type.

    `named` is the class that config.json names, which counts where tokenizer_config.json names
    none. Raises CheckpointError if there is none, or none of this model; nothing of the original
    is run.
    """
    try:
        room = max(_source_size(config), config.vocab_size)
        settings, over = read_settings(directory).within(room)
        said = (settings.tokenizer_class or named).removesuffix("Fast")
        kind = _class_of(directory, said, model_type)
        owner = "" if said in _ANY_CLASS else kind
        found, target = _read(directory, kind, settings, config)
        translation = Translation.of(kind, settings)
        is_file = _has_file(directory)
        if is_file:
            ids = found.tokenizer.get_vocab(with_added_tokens=True)
            usual = UNSAID.get(owner, {}).items()
            names = settings.named_tokens({name: text for name, text in usual if text in ids})
            without, own = (
                {*over, *found.over},
                {*settings.named_tokens({}).values(), *settings.listed()},
            )
            more = add_settled(found.tokenizer, settings, names.values(), room, without)
            over = sorted({*over, *(text for text in more if text in own)})
            follow_settings(found.tokenizer, owner, settings)
        is_told = is_file and not (said and owner)
        _set_source(found.tokenizer, translation, settings, languages, is_told=is_told)
        token = _target_token(found.tokenizer, translation, languages.target)
        checked = _checked(found.tokenizer, _source_size(config))
        checked_target = None if target is None else _checked(target.tokenizer, config.vocab_size)
        files = TextFiles(checked_target, read_chat(directory, settings, owner))
    except (ValueError, OSError) as error:
        raise CheckpointError(
            f"{directory} has no tokenizer of this model: {error}{about_pointers(directory)}"
        ) from error
    notes = [
        *found.notes,
        *_left_out(CONFIG_NAME, over),
        *(target.notes if target else []),
        *_about_end(checked, config),
        *_about_spaces(checked, settings, config),
    ]
    is_start = translation is not None and translation.starts_with_target
    cuts_left = found.cuts_left
    if settings.truncation_side is not None:
        cuts_left = settings.truncation_side == "left"
    return ImportedTokenizer(checked, files, token, is_start, cuts_left, tuple(notes))


def _class_of(directory: Path, said: str, model_type: str) -> str:
    """Return the name of the class that transformers has for the tokenizer; `said`: if any is."""
    named = _CLASSES.get(model_type, "") if said in ("", *_ANY_CLASS) else said
    if named == "M2M100Tokenizer" and not (directory / VOCABULARY_NAME).is_file():
        return "NllbTokenizer"
    return named


def _read(
    directory: Path, kind: str, settings: Settings, config: TransformerConfig
) -> tuple[Made, Made | None]:
    """Return the tokenizer of sources, and that of targets where it is another."""
    room, model = _source_size(config), find_model(directory)
    if _has_file(directory):
        return _read_file(directory / TOKENIZER_NAME, room), None
    if all((directory / name).is_file() for name in MARIAN_NAMES):
        return read_marian(directory, settings)
    if model is not None and kind == "M2M100Tokenizer":
        return read_m2m(model, settings), None
    if model is not None and kind in SENTENCEPIECE:
        return read_pieces(model, kind, settings, room), None
    if model is not None:
        raise ValueError(
            f"{model.name} is of a class that is not known, {kind or 'none'}; known are "
            f"{', '.join(SENTENCEPIECE)}: name one in tokenizer_config.json as tokenizer_class"
        )
    if kind == "ByT5Tokenizer":
        return Made(read_bytes(directory, settings, room), []), None
    if kind in _BYTE_LEVEL and (directory / MERGES_NAME).is_file():
        return Made(_BYTE_LEVEL[kind](directory, settings, room), []), None
    if kind in _WORD_PIECE and (directory / WORDS_NAME).is_file():
        return Made(read_bert(directory, settings, room), []), None
    raise ValueError(_nothing_found(kind))


def _nothing_found(kind: str) -> str:
    names = [TOKENIZER_NAME, *MODEL_NAMES, " with ".join(MARIAN_NAMES), WORDS_NAME]
    names.append(f"{VOCABULARY_NAME} with {MERGES_NAME}")
    wanted = f" for its {kind}" if kind else ""
    return (
        f"there is no file{wanted}, known are {listed(names)}; save it again with transformers: "
        "`AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)`"
    )


def _read_file(path: Path, room: int) -> Made:
    """Read a `tokenizer.json`; added tokens that the model has no room for are left out."""
    try:
        raw = read_bounded(path, MAX_BYTES)
        content = parse_object(raw)
        added = content.get("added_tokens")
        added = added if isinstance(added, list) else []
        over = [token for token in added if _id_of(token) >= room]
        if over:
            content["added_tokens"] = [token for token in added if token not in over]
            raw = json.dumps(content).encode()
        made = parse_tokenizer(raw, room)
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from error
    names = [str(token.get("content")) for token in over]
    return Made(made.tokenizer, _left_out(path.name, names), made.cuts_left, names)


def _left_out(name: str, tokens: Sequence[str]) -> list[str]:
    """Say which tokens of a file the model has no room for."""
    if not tokens:
        return []
    names = listed([shortened(repr(token)) for token in tokens])
    return [f"{name}: tokens above the vocabulary are left out: {names}"]


def _id_of(token: Any) -> int:
    found = token.get("id") if isinstance(token, dict) else None
    return found if isinstance(found, int) else -1


def _set_source(
    tokenizer: Tokenizer,
    translation: Translation | None,
    settings: Settings,
    languages: Languages,
    *,
    is_told: bool,
) -> None:
    """Put the source's language around a text, unless a `tokenizer.json` of no class tells it.

    Where the original names its class, transformers puts it there anew, whatever the file says.
    """
    if translation is None:
        if languages.source is not None:
            raise ValueError("its sources are not told their language; leave --source-lang out")
    elif languages.source is not None or not is_told:
        language = languages.source or settings.src_lang or translation.default
        translation.put_around(tokenizer, language)


def _target_token(
    tokenizer: Tokenizer, translation: Translation | None, language: str | None
) -> int | None:
    if language is None:
        return None
    if translation is None:
        raise ValueError("its outputs are not told their language; leave --target-lang out")
    found: int | None = tokenizer.token_to_id(translation.tokens[translation.checked(language)])
    if found is None:
        raise ValueError(f"its vocabulary lacks the token of {language}")
    return found


def _checked(tokenizer: Tokenizer, room: int) -> Tokenizer:
    """Return the tokenizer as it is read again; ValueError if the model has no room for it."""
    return parse_tokenizer(tokenizer.to_str().encode(), room).tokenizer


def _source_size(config: TransformerConfig) -> int:
    return config.source_vocab_size or config.vocab_size


def _has_file(directory: Path) -> bool:
    return (directory / TOKENIZER_NAME).is_file()


def _about_spaces(tokenizer: Tokenizer, settings: Settings, config: TransformerConfig) -> list[str]:
    """Say if transformers takes spaces out of answers; of pieces by BPE it does not."""
    is_bpe = isinstance(tokenizer.model, models.BPE)
    if not settings.clean_up_tokenization_spaces or is_bpe or not config.num_decoder_layers:
        return []
    return [
        f"{CONFIG_NAME}: clean_up_tokenization_spaces takes the space before a full stop and such "
        "out of answers in transformers; here answers are as the model writes them"
    ]


def _about_end(tokenizer: Tokenizer, config: TransformerConfig) -> list[str]:
    """Say if a source of an encoder-decoder does not end as models of its kind are trained."""
    ids = tokenizer.encode("").ids
    if config.family != "encoder-decoder" or config.eos_token_id in ids:
        return []
    return [
        f"{TOKENIZER_NAME} does not end a source with eos_token_id {config.eos_token_id}; "
        "if the model was trained with it, add it in the post-processor"
    ]
