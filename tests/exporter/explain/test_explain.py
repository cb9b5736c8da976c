from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

import exporter.explain.explain as explain_module
from engine.errors import CheckpointError, InvalidRequest
from engine.requests.generation_defaults import GenerationDefaults
from engine.requests.request import SamplingParams
from engine.scheduling.arrival import make_request
from engine.scheduling.sequence import TokenRequest
from exporter.checkpoint import Checkpoint, CheckpointConfig, TextFiles
from exporter.explain.explain import explain
from exporter.explain.picture import ImageBlock, TextBlock, draw
from exporter.graphs.contracts import generation_contract
from exporter.models import ImageConfig, TransformerConfig, build_model
from exporter.operators.heads import split_heads

WORDS = ["[PAD]", "[CLS]", "[SEP]", "I", "saw", "a", "café", "中文", "$x$"]
TEXT = {
    "d_model": 8,
    "num_heads": 2,
    "d_ff": 8,
    "vocab_size": len(WORDS),
    "max_source_len": 8,
    "max_target_len": 6,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def word_tokenizer(words: Sequence[str] = WORDS) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make_checkpoint(tokenizer: Tokenizer | None, **options: object) -> Checkpoint:
    torch.manual_seed(0)
    config = TransformerConfig.of(options)
    return Checkpoint(
        path=Path("unused"),
        config=CheckpointConfig(task="tests", model=config),
        model=build_model(config).eval(),
        tokenizer=tokenizer,
    )


@pytest.fixture
def bert() -> Checkpoint:
    options = TEXT | {"architecture": "encoder", "num_encoder_layers": 2, "labels": ("a", "b")}
    return make_checkpoint(word_tokenizer(), **options)


@pytest.fixture
def translator() -> Checkpoint:
    layers = {"num_encoder_layers": 2, "num_decoder_layers": 3}
    return make_checkpoint(word_tokenizer(), architecture="encoder-decoder", **layers, **TEXT)


@pytest.fixture
def vit() -> Checkpoint:
    return make_checkpoint(
        None,
        architecture="vision-encoder",
        d_model=8,
        num_heads=2,
        d_ff=8,
        num_encoder_layers=2,
        labels=("cat", "dog"),
        image=ImageConfig(size=12, patch_size=4),
    )


@pytest.fixture
def drawn(monkeypatch) -> list[TextBlock | ImageBlock]:
    """The blocks that would be drawn, without the time that drawing takes."""
    blocks: list[TextBlock | ImageBlock] = []

    def remember(caption: str, given: Sequence[TextBlock | ImageBlock]) -> bytes:
        blocks.extend(given)
        return b"picture"

    monkeypatch.setattr(explain_module, "draw", remember)
    return blocks


@torch.no_grad()
def test_encoder_shows_its_self_attention_over_all_tokens(bert, drawn, tmp_path):
    explain(bert, "I saw a café", tmp_path / "heads.png")

    (block,) = drawn
    assert block.queries == block.keys == ("[CLS]", "I", "saw", "a", "café", "[SEP]")
    assert block.weights.shape == (2, 2, 6, 6)
    first = bert.model.encoder.layers[0].self_attention
    hidden = bert.model.embeddings(torch.tensor([bert.tokenizer.encode("I saw a café").ids]))
    q, k = (split_heads(projection(hidden), 2) for projection in (first.q_proj, first.k_proj))
    expected = (q @ k.mT * 4**-0.5).softmax(-1)[0]
    np.testing.assert_allclose(block.weights[0], expected, atol=1e-6)
    np.testing.assert_allclose(block.weights.sum(-1), 1, atol=1e-5)


def test_labeller_with_relu_weights_is_shown_too(drawn, tmp_path):
    options = TEXT | {
        "architecture": "encoder",
        "head.each_token": True,
        "num_encoder_layers": 1,
        "labels": ("NOUN", "VERB"),
        "attention.score": "additive",
        "attention.normalizer": "relu",
    }

    explain(make_checkpoint(word_tokenizer(), **options), "I saw", tmp_path / "heads.png")

    assert drawn[0].weights.shape == (1, 2, 4, 4)


def test_gpt_shows_causal_attention_with_spaces_and_parts_of_characters_named(drawn, tmp_path):
    options = TEXT | {"architecture": "decoder", "num_decoder_layers": 2, "vocab_size": 256}

    explain(make_checkpoint(byte_tokenizer(), **options), "a é\n", tmp_path / "heads.png")

    (block,) = drawn
    assert block.keys == ("a", "␣", "Ã", "©", "⏎")
    assert not np.triu(block.weights, 1).any()


@torch.no_grad()
def test_encoder_decoder_shows_attention_over_its_greedy_output(translator, drawn, tmp_path):
    explain(translator, "I saw a", tmp_path / "heads.png")

    cross, encoder, decoder = drawn
    source = torch.tensor([translator.tokenizer.encode("I saw a").ids])
    ids = [1]
    while len(ids) < 6 and ids[-1] != 2:
        ids.append(int(translator.model(source, torch.tensor([ids]))[0, -1].argmax()))
    assert cross.queries == decoder.queries == tuple(WORDS[i] for i in ids[1:])
    assert cross.keys == encoder.keys == ("[CLS]", "I", "saw", "a", "[SEP]")
    assert decoder.keys == tuple(WORDS[i] for i in ids[:-1])
    assert cross.weights.shape == (3, 2, len(ids) - 1, 5)
    assert encoder.weights.shape == (2, 2, 5, 5)
    assert decoder.weights.shape == (3, 2, len(ids) - 1, len(ids) - 1)
    assert not np.triu(decoder.weights, 1).any()


def test_its_greedy_output_has_the_tokens_that_it_must_have_and_none_that_it_must_not(
    translator, drawn, tmp_path
):
    defaults = GenerationDefaults(
        forced_begin=(6,), forced_end=8, banned_tokens=(0, 1, 2, 3), max_new_tokens=4
    )
    config = translator.config.model_copy(update={"generation": defaults})

    explain(replace(translator, config=config), "I saw a", tmp_path / "heads.png")

    first, *middle, last = drawn[0].queries
    assert (first, len(middle), last) == ("café", 2, "$x$")
    assert not {*middle} & {*WORDS[:4]}


def test_its_greedy_output_is_as_long_as_the_engine_lets_it_be(translator, drawn, tmp_path):
    defaults = GenerationDefaults(banned_tokens=(2,))
    config = translator.config.model_copy(update={"generation": defaults})
    contract = generation_contract(config.model)
    asked = TokenRequest(0, "", (3,), SamplingParams(), seed=0, arrival=0.0)

    explain(replace(translator, config=config), "I saw a", tmp_path / "heads.png")

    assert len(drawn[0].queries) == make_request(asked, contract).stop_rule.max_new_tokens


def test_encoder_decoder_shows_attention_over_a_given_target(translator, drawn, tmp_path):
    explain(translator, "I saw a", tmp_path / "heads.png", target="a café")

    assert drawn[0].queries == ("a", "café", "[SEP]")
    assert drawn[2].keys == ("[CLS]", "a", "café")


def test_what_is_written_is_shown_by_the_tokenizer_that_writes(translator, drawn, tmp_path):
    writer = word_tokenizer(["[PAD]", "[CLS]", "[SEP]", "ich", "sah", "ein", "Haus", "<de>", "!"])
    defaults = GenerationDefaults(forced_begin=(7,))
    config = translator.config.model_copy(update={"generation": defaults})
    both = replace(translator, config=config, text=TextFiles(target_tokenizer=writer))

    explain(both, "I saw", tmp_path / "heads.png", target="ich sah")
    explain(both, "I saw", tmp_path / "heads.png")

    asked, _, before, own, *_ = drawn
    assert asked.keys == ("[CLS]", "I", "saw", "[SEP]")
    assert asked.queries == ("<de>", "ich", "sah", "[SEP]")
    assert before.keys == ("[CLS]", "<de>", "ich", "sah")
    assert own.queries[0] == "<de>" and {*own.queries} <= {*writer.get_vocab()}


def test_vit_shows_how_the_class_token_attends_to_patches(vit, drawn, tmp_path):
    path = tmp_path / "photo.png"
    Image.fromarray(np.full((20, 30, 3), 200, np.uint8)).save(path)

    explain(vit, str(path), tmp_path / "heads.png")

    (block,) = drawn
    assert block.weights.shape == (2, 2, 3, 3)
    np.testing.assert_allclose(block.image, np.full((12, 12), 200 / 255), atol=1e-6)
    assert "'cat'" in block.title or "'dog'" in block.title


def test_picture_is_a_png_with_a_panel_for_every_head(translator, vit, tmp_path):
    out = tmp_path / "heads.png"

    explain(translator, "I saw a 中文 $x$", out, target="a")

    with Image.open(out) as image:
        assert image.format == "PNG"
        assert image.width > 2 * 200 and image.height > (3 + 2 + 3) * 200
    assert [p.name for p in tmp_path.iterdir()] == ["heads.png"]


def test_image_picture_is_a_png():
    block = ImageBlock("title", np.zeros((8, 8), np.float32), np.ones((1, 2, 2, 2), np.float32))

    with Image.open(io.BytesIO(draw("caption", [block]))) as image:
        assert image.format == "PNG"
        red, green, _ = np.moveaxis(np.asarray(image.convert("RGB")), -1, 0)
        assert (red.astype(int) - green > 100).any()  # attention is red


@pytest.mark.filterwarnings("error")
def test_forty_tokens_have_room_for_their_labels():
    tokens = tuple(f"token{i}" for i in range(40))
    block = TextBlock("title", tokens, tokens, np.ones((1, 1, 40, 40), np.float32) / 40)

    with Image.open(io.BytesIO(draw("caption", [block]))) as image:
        # A 7 point label is 15 pixels high at this resolution.
        assert image.width > 40 * 15 and image.height > 40 * 15


@pytest.mark.parametrize(
    ("text", "target", "complaint"),
    [
        ("I I I I I I I", None, "text: 9 tokens are more than the 8"),
        ("I", "a a a a a a", "target: 7 tokens are more than the 6"),
    ],
)
def test_text_that_is_too_long_is_refused(translator, text, target, complaint, tmp_path):
    with pytest.raises(InvalidRequest, match=complaint):
        explain(translator, text, tmp_path / "heads.png", target=target)


def test_empty_prompt_of_a_gpt_is_refused(tmp_path):
    options = TEXT | {"architecture": "decoder", "num_decoder_layers": 2, "vocab_size": 256}

    with pytest.raises(InvalidRequest, match="text: it has no tokens"):
        explain(make_checkpoint(byte_tokenizer(), **options), "", tmp_path / "heads.png")


def test_target_of_an_encoder_is_refused(bert, tmp_path):
    with pytest.raises(InvalidRequest, match="target: the architecture encoder has none"):
        explain(bert, "I", tmp_path / "heads.png", target="a")


def test_text_for_a_vit_is_refused(vit, tmp_path):
    with pytest.raises(InvalidRequest, match="'a cat' cannot be read .* PNG or JPEG"):
        explain(vit, "a cat", tmp_path / "heads.png")


def test_file_that_is_no_image_is_refused(vit, tmp_path):
    path = tmp_path / "notes.png"
    path.write_text("no image")

    with pytest.raises(InvalidRequest, match="not an image in PNG or JPEG"):
        explain(vit, str(path), tmp_path / "heads.png")


def test_place_that_cannot_be_written_is_named(bert, drawn, tmp_path):
    out = tmp_path / "missing" / "heads.png"

    with pytest.raises(CheckpointError, match=f"cannot write {out}"):
        explain(bert, "I", out)
