"""Reads how sentence-transformers reads texts: how many tokens are left, in which letters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.errors import CheckpointError
from engine.json_file import read_bounded
from engine.package.manifest import MAX_LENGTH
from engine.wording import listed, problems_of, shortened
from exporter.huggingface.sentences import MODULES_NAME
from exporter.models.config import PositiveInt

_AROUND_NAME = "config_sentence_transformers.json"
_TOKENIZER_NAME = "tokenizer_config.json"
_TRANSFORMER_NAMES = tuple(  # older ones are named for the model
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "xlm-roberta")
)
_MAX_BYTES = 2**24  # each file that lists added tokens


class SentenceTexts(BaseModel):
    """How texts are read, in our terms."""

    model_config = ConfigDict(frozen=True)

    limit: int | None = None  # tokens; longer texts are cut; None: what the model takes
    lowers: bool = False  # letters, whatever the tokenizer does
    activation_fn: str = ""  # makes a score of a logit, if a model compares two texts
    notes: tuple[str, ...] = ()


class _Transformer(BaseModel):
    """The file of the first module."""

    max_seq_length: PositiveInt | None = None
    do_lower_case: bool = False


class _Tokenizer(BaseModel):
    """`tokenizer_config.json`."""

    model_max_length: Annotated[float, Field(gt=0)] | None = None  # 1e30: there is no limit


class _CrossEncoder(BaseModel):
    """A model that compares two texts."""

    activation_fn: str | None = None


class _Original(BaseModel):
    """`config.json`; a model that compares two texts has one of them, by its age."""

    sentence_transformers: _CrossEncoder | None = None
    sbert_ce_default_activation_function: str | None = None


class _Around(_CrossEncoder):
    """`config_sentence_transformers.json`."""

    prompts: dict[str, str | None] | None = None
    default_prompt_name: str | None = None
    truncate_dim: int | None = None

    def notes(self) -> Iterator[str]:
        """Say what sentence-transformers does besides."""
        prompts = [name for name, text in (self.prompts or {}).items() if text]
        if prompts:
            chosen = shortened(self.default_prompt_name or "none")
            yield (
                f"{_AROUND_NAME}: its prompts ({listed(prompts)}; by default {chosen}) are yours "
                "to put in front of texts"
            )
        if self.truncate_dim is not None:
            yield f"{_AROUND_NAME}: truncate_dim is {self.truncate_dim}; here vectors stay whole"


_Fields = TypeVar("_Fields", bound=BaseModel)


def read_sentence_texts(directory: Path, config: Mapping[str, Any]) -> SentenceTexts | None:
    """Return how texts are read; None of a model that sentence-transformers did not save.

    Raises ValidationError for fields of `config` that cannot be, CheckpointError for other files.
    """
    original = _Original.model_validate(config)
    told = [original.sbert_ce_default_activation_function]
    if original.sentence_transformers is not None:
        told.insert(0, original.sentence_transformers.activation_fn)
    elif told == [None] and not (directory / MODULES_NAME).is_file():
        return None
    transformer = _read(_Transformer, directory, *_TRANSFORMER_NAMES)
    tokenizer = _read(_Tokenizer, directory, _TOKENIZER_NAME)
    around = _read(_Around, directory, _AROUND_NAME)
    limit = transformer.max_seq_length or tokenizer.model_max_length
    return SentenceTexts(
        limit=limit and int(min(limit, MAX_LENGTH)),
        lowers=transformer.do_lower_case,
        activation_fn=next(filter(None, (*told, around.activation_fn)), ""),
        notes=tuple(around.notes()),
    )


def _read(fields: type[_Fields], directory: Path, *names: str) -> _Fields:
    """Return what the first file of these says that is there; its defaults without any."""
    for path in (directory / name for name in names):
        if path.is_file():
            try:
                return fields.model_validate_json(read_bounded(path, _MAX_BYTES))
            except ValidationError as error:
                problem = problems_of(error, path.name)
            except (ValueError, OSError) as error:
                problem = str(error)
            raise CheckpointError(f"{path}: {problem}; save the model again")
    return fields()
