"""Models of a person's own classes are exported, certified and asked like ours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tokenweir
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

from engine.errors import CertificateError
from engine.package.package import read_manifest
from exporter.examples import own_class, torch_transformer
from exporter.models import ImageConfig
from exporter.models.own import Attend, OwnConfig, PlainAttention, wrap
from exporter.models.torch_transformer import TorchTransformer
from exporter.own import export_own, verify_own

READER = OwnConfig.text_encoder(vocab_size=9, max_len=6, labels=("good", "bad"))


@pytest.mark.parametrize(
    ("example", "answer"),
    [(own_class, "9 0 1 2"), pytest.param(torch_transformer, "def", marks=pytest.mark.long)],
)
def test_example_trains_exports_and_answers(
    example: ModuleType, answer: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)

    assert example.main(str(tmp_path / "package")) == answer

    certificate = read_manifest(tmp_path / "package").certificate
    assert certificate.batch_invariant
    assert certificate.tokens_compared > 100
    assert example.__file__ is not None
    assert len(Path(example.__file__).read_text().splitlines()) < 60


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({f"w{i}": i for i in range(9)}, "w0"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


class Classes(nn.Module):
    """Torch's own layers, and nothing but a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(9, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.output = nn.Linear(16, 2)

    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        hidden = self.layers(self.token(input_ids), src_key_padding_mask=~mask)
        return self.output(hidden[:, 0])


@torch.no_grad()
def test_model_with_a_forward_alone_is_certified_verified_and_asked(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Classes()
    model.output.eval()

    made = export_own(model, READER, tmp_path / "own", tokenizer=tokenizer(), samples=["w3 w4"])

    assert made.certificate.original == "compared with Classes itself"

    assert model.training and not model.output.training, "as it was"
    verify_own(tmp_path / "own", model, READER, tokenizer=tokenizer(), samples=["w3 w4"])
    with tokenweir.load(tmp_path / "own") as client:
        found = client.classify("own", "w3 w4 w5", top=0)
        (info,) = client.models()
    mask = torch.ones(1, 3, dtype=torch.bool)
    expected = model.eval()(torch.tensor([[3, 4, 5]]), mask)[0].softmax(dim=-1)
    probabilities = {one.label: one.probability for one in found.labels}
    assert probabilities == pytest.approx(
        dict(zip(("good", "bad"), expected.tolist(), strict=True)), abs=1e-5
    )
    assert "embed" not in info.capabilities
    with torch.no_grad():
        model.output.weight *= 1.1
    with pytest.raises(CertificateError, match="logits are .* from float64"):
        verify_own(tmp_path / "own", model, READER, tokenizer=tokenizer(), samples=["w3 w4"])


@pytest.mark.long
@torch.no_grad()
def test_own_model_that_sees_pictures_gives_vectors(tmp_path: Path) -> None:
    class Vectors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(48, 5)

        def forward(self, pixel_values: Tensor) -> Tensor:
            return self.project(pixel_values.flatten(1)).tanh()

    config = OwnConfig.image_encoder(ImageConfig(size=4, patch_size=4), vector_dim=5)

    manifest = export_own(Vectors(), config, tmp_path / "own")

    assert manifest.task == "embed" and manifest.certificate.batch_invariant


class Grouped(nn.Module):
    """Two query heads share a key head; heads are not a multiple of what the kernels take."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(9, 12)
        self.packed = nn.Linear(12, 12 + 2 * 6)

    def embed(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.token(input_ids) + position_ids[..., None] / 10

    def blocks(self, hidden: Tensor, attend: Attend) -> Tensor:
        query, key, value = self.packed(hidden).split([12, 6, 6], dim=-1)
        louder = query * (1 + attend.position_ids[..., None] / 10)
        return hidden + attend(0, louder, key, value)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.token.weight.T


@pytest.mark.long
@pytest.mark.parametrize("form", [{}, {"kv_cache": "int8"}, {"target": "cuda"}])
def test_own_decoder_with_shared_key_heads_is_certified_in_formats(
    form: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 9, "max_len": 8, "num_layers": 1, "num_heads": 2, "head_dim": 6}
    config = OwnConfig.generator(**sizes, num_kv_heads=1)

    manifest = export_own(Grouped(), config, tmp_path / "own", tokenizer=tokenizer(), **form)

    assert manifest.certificate.tokens_compared > 0


@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("norm_first", [False, True])
@torch.no_grad()
def test_torch_transformer_computes_what_torch_does(norm_first: bool) -> None:
    torch.manual_seed(0)
    module = nn.Transformer(
        16, 2, 2, 2, 24, activation="gelu", norm_first=norm_first, batch_first=True
    ).eval()
    for weight in module.parameters():
        weight.add_(0.2 * torch.randn_like(weight))
    embed: Callable[[Tensor, Tensor], Tensor] = torch_transformer.Embed()
    embed.token, embed.place = nn.Embedding(9, 16), nn.Embedding(8, 16)  # type: ignore[attr-defined]
    own = TorchTransformer(module, embed, embed, nn.Identity())  # type: ignore[arg-type]
    config = own.describe(
        vocab_size=9, max_source_len=8, max_len=8, start_token_id=1, eos_token_id=0
    )
    source, target = torch.randint(0, 9, (3, 5)), torch.randint(0, 9, (3, 4))
    mask = torch.arange(5) < torch.tensor([5, 2, 1])[:, None]
    places = torch.arange(5).expand(3, 5)

    wrapped: Any = wrap(own, config)
    found = wrapped.decoder.hidden_states(target, wrapped.encode(source, mask), mask)

    expected = module(
        embed(source, places),
        embed(target, places[:, :4]),
        tgt_mask=module.generate_square_subsequent_mask(4),
        src_key_padding_mask=~mask,
        memory_key_padding_mask=~mask,
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_module_that_is_not_batch_first_is_refused() -> None:
    module = nn.Transformer(16, 2, 1, 1, 24)

    with pytest.raises(ValueError, match="not batch_first; build it with batch_first=True"):
        TorchTransformer(module, nn.Identity(), nn.Identity(), nn.Identity())


def test_plain_attention_asks_for_places_that_it_was_not_given() -> None:
    with pytest.raises(AssertionError, match="give them to PlainAttention"):
        _ = PlainAttention(2).position_ids
