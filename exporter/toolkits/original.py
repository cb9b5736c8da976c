"""The content of a toolkit's file, in the terms in which all are imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from engine.requests.generation_defaults import GenerationDefaults
from exporter.huggingface.family import Family, SpecialTokens
from exporter.toolkits.words import Words

OPTIONS_NAME = "options"  # stand in the file of the weights


class ToolkitOptions(BaseModel):
    """Options of a toolkit; those that are not named do not change what a model computes."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


@dataclass(frozen=True)
class ToolkitModel:
    """A model that a toolkit saved."""

    family: Family
    name: str  # its architecture, as the toolkit calls it
    options: Mapping[str, Any]  # with the sizes of the vocabularies
    weights: dict[str, Tensor]
    source_words: Words
    target_words: Words
    tokens: SpecialTokens  # the target's
    generation: GenerationDefaults  # the toolkit's defaults
    usual_len: int | None = None  # tokens of a text, if a person says none; None: the longest
