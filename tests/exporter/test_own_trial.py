"""The faults of a model of a person's own class are said before anything is traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from torch import Tensor, nn

from engine.errors import ConfigError
from exporter.examples.own_class import Counter
from exporter.examples.torch_transformer import Embed
from exporter.models import ImageConfig
from exporter.models.own import OwnConfig
from exporter.models.torch_transformer import TorchTransformer
from exporter.own import export_own

WRITER: dict[str, Any] = {
    **{"vocab_size": 10, "max_len": 16},
    **{"num_layers": 2, "num_heads": 2, "head_dim": 16},
}


def words(size: int) -> Tokenizer:
    return Tokenizer(models.WordLevel({str(i): i for i in range(size)}, "0"))


def refusal(model: nn.Module, config: OwnConfig, path: Path, num_words: int = 8) -> str:
    """Export, and return the message of the error."""
    with pytest.raises(ConfigError) as caught:
        export_own(model, config, path / "package", tokenizer=words(num_words))
    assert not (path / "package").exists()
    return str(caught.value)


class Headless(Counter):
    head = None  # type: ignore[assignment]


class Nested(Counter):
    def head(self, hidden: Tensor) -> Any:
        return super().head(hidden), None


class Deaf(Counter):
    def blocks(self, hidden: Tensor, attend: Any) -> Tensor:
        return hidden


@pytest.mark.parametrize(
    ("model", "described", "message"),
    [
        (Headless, {}, "Headless lacks head; GenerativeModel in exporter/models/own.py says what"),
        (Counter, {"max_source_len": 8, "start_token_id": 1}, "lacks encode, source_keys_values"),
        (Counter, {"num_layers": 3}, "calls attend for layers 0, 1; it is described with 3: each"),
        (Nested, {}, "Nested.head gives a tuple for logits; it is described as [1, 16, 10]"),
        (Deaf, {}, "Deaf.blocks calls attend for layers none; it is described with 2"),
        (Counter, {"vocab_size": 11}, "Counter on a text of 16 tokens: index out of range"),
        (Counter, {"vocab_size": 9}, "gives [1, 16, 10] for logits; it is described as [1, 16, 9]"),
        (Counter, {"max_len": 32}, "Counter on a text of 32 tokens: index out of range"),
        (Counter, {"num_heads": 4}, "layer 0 gives [1, 16, 32] for a query; it is described as"),
        (Counter, {"num_kv_heads": 1}, "[1, 16, 32] for a key; it is described as [1, 16, 16]"),
        (lambda: Counter().to("meta"), {}, "Counter has weights on meta; give a copy on the CPU"),
    ],
)
def test_a_writer_that_is_not_as_described_is_refused(
    model: Any, described: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = OwnConfig.generator(**{**WRITER, **described})

    assert message in refusal(model(), config, tmp_path)


def test_keys_of_a_source_that_are_not_as_described_are_named(tmp_path: Path) -> None:
    module = nn.Transformer(32, 2, 1, 2, 64, batch_first=True)
    own = TorchTransformer(module, Embed(), Embed(), nn.Linear(32, 8))
    sizes = {"vocab_size": 8, "max_len": 8, "max_source_len": 8, "start_token_id": 1}

    few = OwnConfig.generator(**sizes, num_layers=1, num_heads=2, head_dim=16)
    wide = OwnConfig.generator(**sizes, num_layers=2, num_heads=4, head_dim=16)

    assert "for 2 layers; it is described with 1" in refusal(own, few, tmp_path)
    assert "source_keys_values gives [1, 8, 32] for keys; it is described as [1, 8, 64]" in refusal(
        own, wide, tmp_path
    )


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.output = nn.Embedding(10, 8), nn.Linear(8, 2)

    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.output(self.token(input_ids)[:, 0])


class Maskless(Reader):
    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids)


class Named(Reader):
    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> Any:
        return {"logits": super().forward(input_ids, mask), "loss": None}


@pytest.mark.parametrize(
    ("model", "described", "message"),
    [
        (Named, {"labels": ("a", "b")}, "gives a dict for logits; it is described as [1, 2]"),
        (Maskless, {"labels": ("a", "b")}, "Maskless on a text of 6 tokens: "),
        (Reader, {"labels": ("a", "b", "c")}, "gives [1, 2] for logits; it is described as [1, 3]"),
        (Reader, {"labels": ("a", "b"), "each_token": True}, "is described as [1, 6, 2]"),
        (Reader, {"vector_dim": 5}, "gives [1, 2] for a vector; it is described as [1, 5]"),
        (
            Reader,
            {"labels": ("a", "b"), "vector_dim": 5},
            "gives nothing for a vector; it is described as [1, 5]",
        ),
    ],
)
def test_a_reader_that_is_not_as_described_is_refused(
    model: type[nn.Module], described: dict[str, Any], message: str, tmp_path: Path
) -> None:
    config = OwnConfig.text_encoder(vocab_size=10, max_len=6, **described)

    assert message in refusal(model(), config, tmp_path)


def test_a_viewer_that_is_not_as_described_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 5))
    config = OwnConfig.image_encoder(ImageConfig(size=4, patch_size=4), vector_dim=6)

    with pytest.raises(ConfigError, match=r"gives \[1, 5\] for a vector; .* as \[1, 6\]"):
        export_own(model, config, tmp_path / "package")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    message = refusal(Counter(), OwnConfig.generator(**WRITER), tmp_path, num_words=12)

    assert "tokenizer: it has 12 tokens, the model has a vocabulary of 10" in message


def test_a_model_of_texts_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a model of texts needs a tokenizer"):
        export_own(Counter(), OwnConfig.generator(**WRITER), tmp_path / "package")


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.output = nn.Embedding(10, 4), nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.token(input_ids)
        if mask.all():
            return self.output(hidden[:, 0])
        return self.output(hidden[:, 1])


def test_a_branch_that_torch_cannot_trace_is_told_with_its_line(tmp_path: Path) -> None:
    config = OwnConfig.text_encoder(vocab_size=10, max_len=8, labels=("a", "b"))

    message = refusal(Branches(), config, tmp_path)

    line = Path(__file__).read_text().splitlines().index("        if mask.all():") + 1
    assert f"Branches cannot be traced by torch.export at {__file__}, line {line}: " in message
    assert "; no branch and no size may depend on what a tensor holds" in message
    assert "\n" not in message
