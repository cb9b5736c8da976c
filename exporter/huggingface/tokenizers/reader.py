"""Reads the tokenizer of an original, as transformers reads it."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers

from engine.errors import CheckpointError
from engine.text.chat_format import MAX_TEMPLATE_CHARS, ChatFormat, ToolFormat
from engine.text.tokenizer_file import parse_tokenizer
from engine.wording import listed, shortened
from exporter.checkpoint import TOKENIZER_NAME, TextFiles
from exporter.files import writing_scratch
from exporter.huggingface.tokenizers.original import SETTINGS_NAME, Original, load_original
from exporter.huggingface.tokenizers.python_classes import Made, convert_python
from exporter.huggingface.weights.stored import about_pointers
from exporter.models import TransformerConfig

_LAST_SIGMA = (
    r"(?<=\p{Cased}\p{Case_Ignorable}*)\x{3a3}(?!\p{Case_Ignorable}*\p{Cased})"  # ends a word
)
_NLLB_CODE = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}")


@dataclass(frozen=True)
class Languages:
    """A person's languages for a translation model; None: those of the original."""

    source: str | None = None
    target: str | None = None


@dataclass(frozen=True)
class ImportedTokenizer:
    """The tokenizer of an original, and what to know of it."""

    tokenizer: Tokenizer | None = None
    files: TextFiles = TextFiles()  # other files that the checkpoint gets
    target_language: int | None = None  # the token that says what to write, if that is fixed
    starts_with_language: bool = False  # it is what the decoder starts with, else the first output
    cuts_left: bool = False  # a text that is cut keeps its end
    notes: tuple[str, ...] = ()

    def lower(self) -> None:
        """Let all letters of a text become small before anything else is done to it."""
        assert self.tokenizer is not None, "a model that sees pictures has no letters"
        end = normalizers.Replace(Regex(_LAST_SIGMA), "\u03c2")  # which Python knows of
        steps = [end, normalizers.Lowercase(), self.tokenizer.normalizer]
        self.tokenizer.normalizer = normalizers.Sequence([step for step in steps if step])


def read_tokenizer(
    directory: Path, config: TransformerConfig, languages: Languages = Languages()
) -> ImportedTokenizer:
    """Return the tokenizer of a directory.

    Raises CheckpointError if there is none, or none of this model; nothing of the original is run.
    """
    room = config.source_vocab_size or config.vocab_size
    try:
        original = load_original(directory, room)
        tokenizer = original.tokenizer
        token = _set_languages(original, languages)
        if tokenizer.is_fast:
            made, target = Made(tokenizer.backend_tokenizer), None
        else:
            made, target = convert_python(tokenizer, directory)
        checked, over = _within(made.tokenizer, room)
        checked_target = target and _within(target.tokenizer, config.vocab_size)[0]
        files = TextFiles(checked_target, _read_chat(tokenizer))
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            with writing_scratch(refusal=CheckpointError):
                raise
        said = str(error).partition("\n")[0] + about_pointers(directory)
        raise CheckpointError(f"{directory} has no tokenizer of this model: {said}") from error
    notes = []
    if left_out := {*original.left_out, *over}:
        names = listed([shortened(repr(token)) for token in sorted(left_out)])
        notes.append(f"tokens above the vocabulary are left out: {names}")
    notes += [*made.notes, *(target.notes if target else ())]
    ends = checked.encode("").ids
    if config.architecture == "encoder-decoder" and config.eos_token_id not in ends:
        notes.append(
            f"{TOKENIZER_NAME} does not end a source with eos_token_id {config.eos_token_id}; "
            "if the model was trained with it, add it in the post-processor"
        )
    notes += _about_class(original, config)
    is_start = type(tokenizer).__name__ == "MBartTokenizer"
    cuts_left = tokenizer.truncation_side == "left"
    return ImportedTokenizer(checked, files, token, is_start, cuts_left, tuple(notes))


def _set_languages(original: Original, languages: Languages) -> int | None:
    """Tell a translation model its source's language; return the token of its target's, if any."""
    tokenizer, kind = original.tokenizer, type(original.tokenizer)
    if not hasattr(kind, "src_lang"):
        for name, given in (("source", languages.source), ("target", languages.target)):
            if given is not None:
                raise ValueError(f"its {name}s are not told a language; leave --{name}-lang out")
        return None
    if kind.__name__ == "NllbTokenizer":
        if original.is_old and "added_tokens_decoder" not in original.settings:
            raise ValueError(
                "its languages get other ids in transformers 5 than it was trained with; save it "
                f"again with transformers 4, which writes {TOKENIZER_NAME}"
            )
        added = tokenizer.get_added_vocab()
        known = {text: i for text, i in added.items() if _NLLB_CODE.fullmatch(text)}
    else:
        known = tokenizer.lang_code_to_id
    for language in (languages.source or tokenizer.src_lang, languages.target):
        if language is not None and language not in known:
            raise ValueError(
                f"language {shortened(repr(language))} is not one of the model's; "
                f"it knows {listed(list(known))}"
            )
    if languages.source is not None:
        tokenizer.src_lang = languages.source
    return None if languages.target is None else int(known[languages.target])


def _within(tokenizer: Tokenizer, room: int) -> tuple[Tokenizer, list[str]]:
    """Return a tokenizer as it is read again, and the added tokens for which there is no room.

    Raises ValueError if other tokens have no room either.
    """
    added = tokenizer.get_added_tokens_decoder()
    over = {token.content for i, token in added.items() if i >= room}
    # The library writes another thing than it does of a special token that was added as plain.
    silent = {
        i
        for i, token in added.items()
        if not token.special and tokenizer.decode([i]) != tokenizer.decode([i], False)
    }
    raw = tokenizer.to_str()
    if over or silent:
        content, kept = json.loads(raw), []
        for one in content["added_tokens"]:
            one["special"] = one["special"] or one["id"] in silent
            kept += [one] if one["id"] < room else []
        content["added_tokens"] = kept
        model = content["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {t: i for t, i in model["vocab"].items() if i < room or t not in over}
        else:
            cut = [one for one in model["vocab"][room:] if one[0] not in over]
            model["vocab"] = [*model["vocab"][:room], *cut]
        raw = json.dumps(content)
    return parse_tokenizer(raw.encode(), room).tokenizer, sorted(over)


def _read_chat(tokenizer: Any) -> ChatFormat | None:
    """Return how a conversation becomes a text; None: the original does not say."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default", next(iter(template.values()), None))
    if template is None:
        return None
    if not isinstance(template, str):
        raise ValueError(f"{SETTINGS_NAME}: chat_template is {shortened(repr(template))}, no text")
    if len(template) > MAX_TEMPLATE_CHARS:
        raise ValueError(f"its chat template has more than {MAX_TEMPLATE_CHARS:,} characters")
    return ChatFormat(
        template=template,
        tokens=tokenizer.special_tokens_map,
        tool_format=_tool_format(template),
    )


def _tool_format(template: str) -> ToolFormat | None:
    """Return how a model writes calls of functions, by what its template tells it of them."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<tool_call>" in template:  # others have XML in it
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if '{"name": function name, "parameters":' in template:
        return "llama3_json"
    return None


def _about_class(original: Original, config: TransformerConfig) -> Iterator[str]:
    """Say what transformers 5 does otherwise than a package, or than its earlier versions."""
    tokenizer, kind = original.tokenizer, type(original.tokenizer).__name__
    if not tokenizer.is_fast:
        return
    read = type(tokenizer.backend_tokenizer.model)
    if original.algorithm and original.algorithm != read.__name__:
        yield (
            f"its file has a {original.algorithm} model, and {kind} of transformers 5 reads it as "
            f"{read.__name__}; to have a {TOKENIZER_NAME} as it is, name TokenizersBackend as "
            f"tokenizer_class in {SETTINGS_NAME}"
        )
    if kind in ("LlamaTokenizer", "GemmaTokenizer") and original.is_old:
        if original.settings.get("add_bos_token") is None:
            yield (
                f"{SETTINGS_NAME} does not say add_bos_token: transformers 5 takes it for false, "
                "4 for true; say which, if texts are to begin with "
                f"{tokenizer.bos_token}"
            )
    if kind == "TokenizersBackend" and original.is_old:
        yield (
            "transformers 5 has no class for its SentencePiece model, and begins texts with no "
            f"space; a {TOKENIZER_NAME} says how they begin"
        )
    if tokenizer.split_special_tokens:
        yield f"{SETTINGS_NAME}: split_special_tokens is not followed: they are found in texts"
    if tokenizer.clean_up_tokenization_spaces and config.num_decoder_layers and read != models.BPE:
        yield (
            f"{SETTINGS_NAME}: clean_up_tokenization_spaces takes the space before a full stop and "
            "such out of answers in transformers; here answers are as the model writes them"
        )
