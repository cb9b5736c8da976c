"""What a family of models is: a declaration of its options and of where its weights are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from engine.wording import shortened
from exporter.checkpoint import CONFIG_NAME
from exporter.huggingface.conversion import NameTable
from exporter.models.config import TransformerConfig

Ability = Literal["generate", "beam", "score", "classify", "label", "embed"]

WRITES: tuple[Ability, ...] = ("generate", "beam", "score")
READS: tuple[Ability, ...] = ("classify", "label", "embed")

# Names of Hugging Face, and ours.
Activation = Literal["relu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "silu", "swish"]
ACTIVATIONS: Mapping[Activation, Literal["relu", "gelu", "gelu_tanh", "silu"]] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


class OriginalConfig(BaseModel):
    """`config.json` of an original, as far as any family has it; a family adds its own fields.

    A field of one allowed value is an option that must not be set otherwise. Fields that are not
    named do not change what the model computes.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    second_names: ClassVar[Mapping[str, str]] = {}  # of fields of config.json, which have either
    weak_names: ClassVar[frozenset[str]] = frozenset()  # of these, what counts if it stands alone

    quantization_config: None = None

    @model_validator(mode="before")
    @classmethod
    def _under_one_name(cls, given: dict[str, Any]) -> dict[str, Any]:
        for second, name in cls.second_names.items():
            if second not in given or (second in cls.weak_names and name in given):
                continue
            if given.get(name, given[second]) != given[second]:
                said = f"{name} is {shortened(str(given[name]))} and {second} "
                said += shortened(str(given[second]))
                raise ValueError(f"{said}; they are two names of one option: give one of them")
            given = {**given, name: given[second]}
        return given

    def notes(self) -> list[str]:
        """Say what a person should know of what is not taken over."""
        return []


_WRITERS = ("ForCausalLM", "ForConditionalGeneration", "Model")  # how their classes end


class WriterConfig(OriginalConfig):
    """`config.json` of a model that writes, whose head is that of a vocabulary."""

    architectures: tuple[str, ...] | None = None

    @field_validator("architectures")
    @classmethod
    def _writes(cls, given: tuple[str, ...] | None) -> tuple[str, ...] | None:
        if given and not given[0].endswith(_WRITERS):
            raise ValueError(
                f"architectures is {shortened(given[0])}; supported: classes that end in "
                f"{', '.join(_WRITERS)}"
            )
        if given and given[0].endswith("EncoderModel"):
            raise ValueError(
                f"architectures is {shortened(given[0])}, an encoder without the decoder that "
                "writes; supported: models with both"
            )
        return given


Fields = TypeVar("Fields", bound=OriginalConfig)


@dataclass(frozen=True)
class SpecialTokens:
    """The ids that begin, end and fill sequences; None: the original names none."""

    eos: int | None
    pad: int | None
    decoder_start: int | None


@dataclass(frozen=True)
class Family(Generic[Fields]):
    """A family: its options in our terms, its weights by our names, and what it can do."""

    title: str  # for a person
    model_types: tuple[str, ...]  # of config.json
    fields: type[Fields]  # the fields of config.json that are read
    to_config: Callable[[Fields, SpecialTokens], TransformerConfig]
    weights: Callable[[TransformerConfig], NameTable]
    abilities: tuple[Ability, ...]
    body: str = ""  # the prefix that names lack in a file of the body alone
    ignored: str = ""  # the names of tensors that say nothing: masks, computed tables
    files: tuple[str, ...] = ()  # more JSON files: fields of the original, named for their stems
    options_name: str = CONFIG_NAME  # what says the options in an original

    def read_config(
        self, raw: Mapping[str, Any], tokens: SpecialTokens
    ) -> tuple[TransformerConfig, list[str]]:
        """Return the options in our terms, and what a person should know of them.

        ValidationError names those that we do not have.
        """
        given = self.fields.model_validate(raw)
        return self.to_config(given, tokens), given.notes()
