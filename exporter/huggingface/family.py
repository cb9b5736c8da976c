"""A family of models: a table of its options and of the places of its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.package.manifest import Architecture
from engine.wording import shortened
from exporter.checkpoint import CONFIG_NAME
from exporter.huggingface.conversion import NameTable
from exporter.huggingface.sentences import SentenceModules, SentenceTexts
from exporter.models.config import TransformerConfig

Ability = Literal["generate", "beam", "score", "classify", "label", "embed"]
Options = Mapping[str, Any]

WRITES: tuple[Ability, ...] = ("generate", "beam", "score")
_ABILITIES: Mapping[Architecture, tuple[Ability, ...]] = {
    "decoder": WRITES,
    "encoder-decoder": WRITES,
    "encoder": ("classify", "label", "embed"),
    "vision-encoder": ("classify", "embed"),
}

_ACTIVATION = "feed_forward.activation"
# Names of Hugging Face, and ours.
ACTIVATIONS: Mapping[str, Literal["relu", "gelu", "gelu_tanh", "silu"]] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


@dataclass(frozen=True)
class SpecialTokens:
    """The ids that begin, end and fill sequences; None: the original names none."""

    eos: int | None
    pad: int | None
    decoder_start: int | None


@dataclass(frozen=True)
class Original:
    """The statements of an original on its model, and the wishes of its importer."""

    config: Any  # read by transformers, which has defaults and one name for each option
    tokens: SpecialTokens
    said: Options = field(default_factory=dict)  # config.json as it is
    asked_len: int | None = None  # the importer's wish
    modules: SentenceModules | None = None
    texts: SentenceTexts | None = None
    pictures: Any = None  # the image processor of transformers

    @property
    def architecture(self) -> str | None:
        """The name of the class that saved it."""
        named = self.config.architectures
        return str(named[0]) if isinstance(named, list) and named else None


@dataclass(frozen=True)
class Family:
    """A family: its options in our terms, and its weights by our names."""

    title: str  # for a person
    model_types: tuple[str, ...]  # names in config.json
    weights: Callable[[TransformerConfig], NameTable]
    # Ours, by their paths in a TransformerConfig, that all models of the family share
    fixed: Options
    options: Mapping[str, str] = field(default_factory=dict)  # ours, and theirs that say the same
    computed: Callable[[Original], Options] = lambda _: {}  # the others; they count before
    # Values that an option of theirs may have, where it changes what is computed.
    supported: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    notes: Callable[[Original], list[str]] = lambda _: []  # remarks for a person
    body: str = ""  # the prefix that names lack in a file of the body alone
    ignored: str = ""  # the names of tensors that say nothing: masks, computed tables
    options_name: str = CONFIG_NAME  # the file of an original that has the options

    @property
    def abilities(self) -> tuple[Ability, ...]:
        """The abilities of its models, of which each has those of its head."""
        return _ABILITIES[self.fixed["architecture"]]

    def read_config(self, original: Original) -> TransformerConfig:
        """Return the options in our terms.

        ValueError names those that we do not have; pydantic's has our names of options.
        """
        supported = dict(self.supported)
        if _ACTIVATION in self.options:
            supported[self.options[_ACTIVATION]] = tuple(ACTIVATIONS)
        wrong = [
            refused(name, value, values)
            for name, values in supported.items()
            if (value := getattr(original.config, name, values[0])) not in values
        ]
        if wrong:
            raise ValueError("; ".join(wrong))
        found = {ours: getattr(original.config, theirs) for ours, theirs in self.options.items()}
        if _ACTIVATION in found:
            found[_ACTIVATION] = ACTIVATIONS[found[_ACTIVATION]]
        try:
            found = {**self.fixed, **found, **self.computed(original)}
            return TransformerConfig.of(found)
        except ArithmeticError as error:
            raise ValueError(f"its numbers cannot be: {error}") from error


def refused(name: str, value: object, supported: tuple[object, ...]) -> str:
    """Say that an option has a value that is not supported, and which are."""
    return f"{name} is {shortened(repr(value))}; supported: {', '.join(map(repr, supported))}"


_WRITERS = ("ForCausalLM", "ForConditionalGeneration", "Model")  # how their classes end


def check_writes(original: Original) -> None:
    """Raise ValueError for a class whose head is not that of a vocabulary."""
    named = original.architecture or ""
    if named and not named.endswith(_WRITERS):
        raise ValueError(
            f"architectures is {shortened(named)}; supported: classes that end in "
            f"{', '.join(_WRITERS)}"
        )
    if named.endswith("EncoderModel"):
        raise ValueError(
            f"architectures is {shortened(named)}, an encoder without the decoder that writes; "
            "supported: models with both"
        )
