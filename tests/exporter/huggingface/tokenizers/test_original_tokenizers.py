"""Tokenizers that an import makes, against those of transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.models.byt5.tokenization_byt5 import ByT5Tokenizer
from transformers.models.m2m_100.tokenization_m2m_100 import M2M100Tokenizer
from transformers.models.marian.tokenization_marian import MarianTokenizer

from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.factory import load_engine
from engine.package.package import load_package
from engine.requests.events import TextDelta
from engine.requests.request import GenerationRequest, SamplingParams
from exporter.checkpoint import load_checkpoint, read_config
from exporter.compare.original import compare_with_original
from exporter.export import copied_files, export_package
from exporter.huggingface import import_checkpoint
from exporter.huggingface.tokenizers import ImportedTokenizer, Languages, read_tokenizer
from exporter.models import TransformerConfig
from tests.exporter.huggingface.lines import difficult_lines
from tests.exporter.huggingface.sources import save_marian
from tests.exporter.huggingface.tokenizers.test_tokenizers import equally_likely
from tests.exporter.huggingface.translation_sources import save as save_translation

LINES = pytest.mark.parametrize("num_lines", [400, pytest.param(10_000, marks=pytest.mark.long)])
TRAINING = difficult_lines(2000, seed=1)


def read(
    source: Path,
    architecture: str = "encoder-decoder",
    vocab_size: int = 9000,
    *,
    model_type: str = "",
    **options: Any,
) -> ImportedTokenizer:
    """Return what an import makes of a directory, whose config.json says no more than its type."""
    if model_type:
        write_json(source / "config.json", {"model_type": model_type})
    config = TransformerConfig.model_construct(
        architecture=architecture, vocab_size=vocab_size, eos_token_id=0, source_vocab_size=None
    )
    return read_tokenizer(source, config, **options)


def train_spm(path: Path, lines: list[str], **options: Any) -> list[str]:
    """Train a model and return its pieces."""
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=file, hard_vocab_limit=False,
            character_coverage=0.98, minloglevel=2,
            **{"vocab_size": 3500, "normalization_rule_name": "identity", **options},
        )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [model.id_to_piece(i) for i in range(model.get_piece_size())]


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def differences(
    tokenizer: Tokenizer, original: Callable[[str], list[int]], lines: list[str]
) -> Iterator[str]:
    """Yield the lines whose ids differ."""
    for line in lines:
        found, wanted = tokenizer.encode(line), original(line)
        if found.ids != wanted:
            yield f"{line!r}: {wanted}, here {found.ids} {found.tokens}"


def lay_out_marian(source: Path, lines: list[str], **options: Any) -> int:
    """Write the files of OPUS-MT, of a model of several target languages; return how many ids."""
    pieces = train_spm(source / "source.spm", lines[::2], **options)
    pieces += train_spm(source / "target.spm", lines[1::2], **options)
    names = ["</s>", "<unk>", *pieces, ">>fra<<", ">>deu<<", "<pad>"]
    order = list(dict.fromkeys(names))
    write_json(source / "vocab.json", {name: i for i, name in enumerate(order)})
    write_json(source / "tokenizer_config.json", {"source_lang": "eng", "target_lang": "mul"})
    return len(order)


@LINES
@pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")
def test_marian_reads_with_one_model_and_writes_with_another(
    num_lines: int, tmp_path: Path
) -> None:
    lay_out_marian(tmp_path, TRAINING)
    original = MarianTokenizer.from_pretrained(tmp_path)
    lines = difficult_lines(num_lines, seed=4)

    found = read(tmp_path, model_type="marian")
    target = found.files.target_tokenizer
    assert target is not None

    for tokenizer, model, name in (
        (found.tokenizer, original.spm_source, "text"),
        (target, original.spm_target, "text_target"),
    ):
        different = [
            line
            for line in lines
            if tokenizer.encode(line).ids != original(**{name: line}).input_ids
        ]
        for line in different:
            tokens = tokenizer.encode(line).tokens[:-1]
            assert equally_likely(model, model.piece_to_id(tokens), model.encode(line)), line
    for line in lines:
        ids = original(text_target=line).input_ids
        assert target.decode(ids).strip() == original.decode(ids, skip_special_tokens=True).strip()
    told, *others = original(text_target="hello there").input_ids
    ids = [told, found.tokenizer.token_to_id("<s>"), *others]  # which is not a special token there
    assert target.decode(ids) == original.decode(ids, skip_special_tokens=True)
    typed = "a <s> b</s> c<pad>"  # a Marian has no use for the first
    assert found.tokenizer.encode(typed).ids == original(typed).input_ids
    assert target.encode(typed).ids == original(text_target=typed).input_ids
    told = found.tokenizer.encode(">>fra<< hello")
    assert told.ids == original(">>fra<< hello").input_ids and told.tokens[0] == ">>fra<<"


def test_a_checkpoint_has_a_tokenizer_for_what_is_written_until_it_is_another_one(
    tmp_path: Path,
) -> None:
    source, out = tmp_path / "source", tmp_path / "checkpoint"
    save_marian(source)
    tokens = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    (source / "tokenizer.json").unlink()
    (source / "tokenizer_config.json").unlink()
    train_spm(source / "source.spm", ["a b"] * 9, vocab_size=9)
    train_spm(source / "target.spm", ["c d"] * 9, vocab_size=9)
    pieces = ["</s>", "<unk>", "<pad>", *"▁abcd"]
    names = [*pieces, *(f"w{i}" for i in range(len(tokens) - len(pieces)))]
    write_json(source / "vocab.json", {name: i for i, name in enumerate(names)})

    import_checkpoint(source, out)

    checkpoint = load_checkpoint(out)
    assert "target_tokenizer.json" in copied_files(checkpoint)
    assert checkpoint.tokenizer is not None and checkpoint.target_tokenizer is not None
    # Marian takes a character that its first model lacks from the other one's pieces, too.
    assert checkpoint.tokenizer.encode("a c").tokens == ["▁", "a", "▁", "c", "</s>"]
    assert checkpoint.tokenizer.encode("a cd").ids[-2:] == [names.index("<unk>"), 0]

    save_marian(source)  # all of its class is said in its file
    import_checkpoint(source, out)

    assert copied_files(load_checkpoint(out)) == ["config.json", "tokenizer.json"]


@pytest.mark.parametrize(
    ("kind", "language", "place", "is_forced", "other"),
    [
        ("NllbTokenizer", "zho_Hant", 2, True, "deu_Latn"),
        ("MBartTokenizer", "de_DE", 2, False, "fr_XX"),
    ],
)
def test_the_language_of_the_target_is_kept_in_the_checkpoint(
    kind: str, language: str, place: int, is_forced: bool, other: str, tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "checkpoint"
    save_translation("mbart", source, vocab_size=232, decoder_start_token_id=2, eos_token_id=2)
    (source / "tokenizer.json").unlink()
    options = {"unk_id": 0, "bos_id": 1, "eos_id": 2, "vocab_size": 9, "model_type": "unigram"}
    if kind == "NllbTokenizer":
        options |= {"vocab_size": 7, "model_type": "bpe"}
    pieces = train_spm(source / "sentencepiece.bpe.model", ["a b"] * 9, **options)
    codes = ("eng_Latn", "deu_Latn", "zho_Hant", "<mask>")
    listed = {len(pieces) + 1 + i: {"content": c, "special": True} for i, c in enumerate(codes)}
    settings = {"added_tokens_decoder": listed} if kind == "NllbTokenizer" else {}
    write_json(source / "tokenizer_config.json", {"tokenizer_class": kind, **settings})

    import_checkpoint(source, out, languages=Languages(target=language))

    config = read_config(out)
    token = len(pieces) + 1 + place
    assert config.generation.forced_begin == ((token,) if is_forced else ())
    assert config.model.bos_token_id == (2 if is_forced else token)
    assert "21 options" in compare_with_original(source, out, Languages(target=language)).said
    told = "forced_bos" if is_forced else "decoder_start"
    with pytest.raises(CheckpointError, match=rf"{told}_token_id is .*{token}\b.*, there"):
        compare_with_original(source, out, Languages(target=other))


@pytest.mark.long
async def test_a_package_reads_with_one_tokenizer_and_writes_with_another(
    tmp_path: Path,
) -> None:
    source, files = tmp_path / "source", tmp_path / "files"
    files.mkdir()
    size = lay_out_marian(files, [line for line in TRAINING if line.isascii()], vocab_size=120)
    save_marian(source, vocab_size=size, pad_token_id=size - 1, eos_token_id=0,
                decoder_start_token_id=size - 1)  # fmt: skip
    (source / "tokenizer.json").unlink()
    shutil.copytree(files, source, dirs_exist_ok=True)

    import_checkpoint(source, tmp_path / "checkpoint")
    export_package(tmp_path / "checkpoint", tmp_path / "package")

    package = load_package(tmp_path / "package")
    engine = load_engine(package, EngineConfig(max_num_seqs=2, num_threads=1))
    target = read(files, model_type="marian").files.target_tokenizer
    await engine.start()
    request = GenerationRequest("one", "the lazy dog", SamplingParams(max_new_tokens=5))
    events = [event async for event in engine.generate(request)]
    await engine.stop()
    written = "".join(event.text for event in events if isinstance(event, TextDelta))
    ids = [i for event in events if isinstance(event, TextDelta) for i in event.token_ids]
    assert target is not None and ids and written == target.decode(ids)


@LINES
def test_m2m100_has_the_ids_of_its_vocabulary(num_lines: int, tmp_path: Path) -> None:
    pieces = train_spm(tmp_path / "sentencepiece.bpe.model", TRAINING, model_type="bpe")
    names = dict.fromkeys(["<s>", "<pad>", "</s>", "<unk>", *pieces])
    write_json(tmp_path / "vocab.json", {name: i for i, name in enumerate(names)})
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "M2M100Tokenizer"})
    original = M2M100Tokenizer.from_pretrained(tmp_path, src_lang="de", tgt_lang="fr")

    found = read(tmp_path, languages=Languages("de", "fr"))

    lines = difficult_lines(num_lines, seed=5)
    assert not list(differences(found.tokenizer, lambda line: original(line).input_ids, lines))
    assert found.target_language == original.get_lang_id("fr")
    for line in lines:
        ids = original(line).input_ids[1:]  # its language is shown unless a file says it is special
        text = found.tokenizer.decode(ids).strip()
        assert text == original.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train a model as that of Llama 2 was."""
    path = tmp_path_factory.mktemp("llama") / "tokenizer.model"
    train_spm(path, TRAINING, model_type="bpe", byte_fallback=True, split_digits=True,
              remove_extra_whitespaces=False, allow_whitespace_only_pieces=True)  # fmt: skip
    return path


def test_llama_that_does_not_say_how_texts_begin_is_told(llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama, tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"})

    found = read(tmp_path, "decoder", model_type="llama")

    assert found.tokenizer.encode("<s>[a]").tokens[:2] == ["<s>", "["]
    assert "tokenizer_config.json does not say add_bos_token: transformers 5" in str(found.notes)


def test_pieces_that_no_class_reads_are_told(llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama, tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"})

    found = read(tmp_path, "decoder", model_type="mistral")

    assert "transformers 5 has no class for its SentencePiece model" in str(found.notes)
    original = AutoTokenizer.from_pretrained(tmp_path)
    assert found.tokenizer.encode("a b").ids == original("a b").input_ids


@LINES
def test_byt5_has_three_more_than_a_byte(num_lines: int, tmp_path: Path) -> None:
    write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": "ByT5Tokenizer"})
    original = ByT5Tokenizer()

    tokenizer = read(tmp_path).tokenizer

    lines = difficult_lines(num_lines, seed=6)
    assert not list(differences(tokenizer, lambda line: original(line).input_ids, lines))
    assert [tokenizer.decode(tokenizer.encode(line).ids) for line in lines] == lines
    marked = "a <extra_id_0> b"
    assert tokenizer.encode(marked).ids == original(marked).input_ids
