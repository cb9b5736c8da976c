"""Texts are read as sentence-transformers reads them: cut, in small letters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenweir
import torch
from transformers import AutoTokenizer

from engine.errors import CheckpointError
from engine.package.manifest import PackageFormat
from exporter.checkpoint import load_checkpoint, read_config
from exporter.huggingface import import_checkpoint
from tests.exporter.huggingface.encoders import save_encoder, save_sentence_modules
from tests.exporter.huggingface.encoders import tokenizer as its_tokenizer
from tests.exporter.huggingface.sources import edit_json
from tests.fakes.stand_in_certificate import export_with_stand_in

LONG = "the cat sat on the mat and the dog sat on the cat"
SHORT = "the cat"


def save(source: Path, **files: dict[str, Any]) -> Any:
    """Save a model as sentence-transformers does, with these files of settings beside it."""
    twin = save_encoder(source, "bert", "embed")
    save_sentence_modules(source, "mean_tokens")
    for name, content in files.items():
        (source / f"{name}.json").write_text(json.dumps(content))
    return twin


def limit_of(source: Path, **options: Any) -> int | None:
    import_checkpoint(source, source.with_name("checkpoint"), **options)
    return read_config(source.with_name("checkpoint")).model.cut_at


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, 14),  # the positions of the model
        ({"sentence_bert_config": {"max_seq_length": 6, "do_lower_case": False}}, 6),
        ({"sentence_roberta_config": {"max_seq_length": 6}}, 6),
        ({"sentence_bert_config": {"max_seq_length": 500}}, 14),
        ({"sentence_bert_config": {"max_seq_length": None}}, 14),
        ({"tokenizer_config": {"model_max_length": 5}}, 5),
        ({"tokenizer_config": {"model_max_length": 1000000000000000019884624838656}}, 14),
        ({"tokenizer_config": {"model_max_length": 1e30}}, 14),
        (
            {
                "sentence_bert_config": {"max_seq_length": 7},
                "tokenizer_config": {"model_max_length": 5},
            },
            7,
        ),
    ],
)
def test_limit_is_that_of_sentence_transformers(
    files: dict[str, dict[str, Any]], limit: int, tmp_path: Path
) -> None:
    save(tmp_path / "source", **files)

    assert limit_of(tmp_path / "source") == limit
    assert limit_of(tmp_path / "source", max_len=4) == 4
    assert limit_of(tmp_path / "source", max_len=50) == 14


def test_model_of_no_sentences_cuts_nothing(tmp_path: Path) -> None:
    save_encoder(tmp_path / "source", "bert", "embed")

    assert limit_of(tmp_path / "source") is None


@pytest.mark.parametrize(
    ("said", "in_file", "lost"),
    [
        (None, None, ""),
        ("left", None, ", their beginnings off"),
        (None, "left", ", their beginnings off"),
        ("right", "left", ""),
    ],
)
@torch.no_grad()
def test_long_text_has_the_vector_of_the_end_that_transformers_keeps(
    said: str | None, in_file: str | None, lost: str, tmp_path: Path
) -> None:
    settings = {"tokenizer_class": "BertTokenizer", **({"truncation_side": said} if said else {})}
    files = {"sentence_bert_config": {"max_seq_length": 6}, "tokenizer_config": settings}
    twin = save(tmp_path / "source", **files)
    if in_file is not None:
        made = its_tokenizer()
        made.enable_truncation(5, direction=in_file)
        made.save(str(tmp_path / "source" / "tokenizer.json"))
    notes = import_checkpoint(tmp_path / "source", tmp_path / "checkpoint").notes
    export_with_stand_in(tmp_path / "checkpoint", tmp_path / "package", PackageFormat())

    cutting = AutoTokenizer.from_pretrained(tmp_path / "source")
    with tokenweir.load(tmp_path / "package", num_threads=1) as client:
        for text, pair in ((LONG, None), (SHORT, LONG), (LONG, SHORT), (SHORT, None)):
            found = client.embed("package", text, text_pair=pair)

            cut = cutting(text, pair, truncation=True, max_length=6, return_tensors="pt")
            assert found.usage.input_tokens == cut.input_ids.shape[1] <= 6
            expected = twin(**cut).last_hidden_state[0].mean(dim=0)
            assert list(found.values) == pytest.approx(expected.tolist(), abs=1e-4)
        with pytest.raises(tokenweir.InvalidArgument, match="7 tokens are more than 6"):
            client.embed("package", [4] * 7)
    assert f"texts are cut at 6 tokens{lost}, as sentence-transformers cuts them" in notes


def test_letters_become_small_where_sentence_transformers_makes_them_so(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save(source, sentence_bert_config={"do_lower_case": True})
    edit_json(source / "tokenizer.json", normalizer=None)

    import_checkpoint(source, tmp_path / "checkpoint")

    tokenizer = load_checkpoint(tmp_path / "checkpoint").tokenizer
    assert tokenizer is not None
    assert tokenizer.encode("THE cat").tokens == tokenizer.encode("the cat").tokens
    for text in ("ΟΔΟΣ, ΟΔΟΣ", "Σ ΑΣ'Α ΑΣ'", "Α.Σ 1Σ ΑΣΣ"):  # the last of a word differs
        assert tokenizer.normalizer.normalize_str(text) == text.lower()


@torch.no_grad()
def test_prompts_stand_in_front_of_texts_as_in_sentence_transformers(tmp_path: Path) -> None:
    prompts = {"query": "the dog: ", "passage": "on the mat "}
    around = {"prompts": prompts, "default_prompt_name": "passage", "truncate_dim": 4}
    settings = {"tokenizer_class": "BertTokenizer"}
    files = {"config_sentence_transformers": around, "tokenizer_config": settings}
    twin = save(tmp_path / "source", **files)

    notes = import_checkpoint(tmp_path / "source", tmp_path / "checkpoint").notes
    export_with_stand_in(tmp_path / "checkpoint", tmp_path / "package", PackageFormat())

    its = AutoTokenizer.from_pretrained(tmp_path / "source")
    told = {"query": "the dog: ", "passage": "on the mat ", "document": "", "": ""}
    with tokenweir.load(tmp_path / "package", num_threads=1) as client:
        for name, prompt in (*told.items(), (None, told["passage"])):
            found = client.embed("package", SHORT, prompt_name=name)
            hidden = twin(**its(prompt + SHORT, return_tensors="pt")).last_hidden_state
            expected = hidden[0].mean(dim=0).tolist()
            assert list(found.values) == pytest.approx(expected, abs=1e-4)
        with pytest.raises(tokenweir.InvalidArgument) as unknown:
            client.embed("package", SHORT, prompt_name="doc")
        with pytest.raises(tokenweir.InvalidArgument, match="prompt_name: a prompt stands"):
            client.embed("package", [4, 5], prompt_name="query")
        assert len(client.embed("package", [4, 5]).values) == 16
    assert unknown.value.violations[0].description == (
        "doc is no prompt of this model; it has query, document, passage"
    )
    assert "prompts (query, document, passage; by default passage) stand in front" in str(notes)
    assert "truncate_dim is 4; here vectors stay whole" in str(notes)


def test_prompts_that_do_not_count_in_the_vector_are_left_to_the_caller(tmp_path: Path) -> None:
    around = {"prompts": {"query": "Search: "}}
    save(tmp_path / "source", config_sentence_transformers=around)
    edit_json(tmp_path / "source" / "1_Pooling" / "config.json", include_prompt=False)

    notes = import_checkpoint(tmp_path / "source", tmp_path / "checkpoint").notes

    assert "its prompts (query, document; by default none) are yours to put in front" in str(notes)
    assert not read_config(tmp_path / "checkpoint").model.prompts


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("sentence_bert_config", {"max_seq_length": 0}, "max_seq_length: .* greater than 0"),
        ("tokenizer_config", {"model_max_length": "long"}, "model_max_length: .* valid number"),
        ("config_sentence_transformers", ["prompts"], "config_sentence_transformers.json: "),
        (
            "config_sentence_transformers",
            {"prompts": {"query": "Q: "}, "default_prompt_name": "q"},
            r".*default_prompt_name is q, none of prompts \(query, document\)",
        ),
    ],
)
def test_settings_that_cannot_be_are_named_with_their_file(
    name: str, content: Any, reason: str, tmp_path: Path
) -> None:
    save(tmp_path / "source", **{name: content})

    with pytest.raises(CheckpointError, match=rf"{name}\.json: {reason}"):
        import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")


@pytest.mark.parametrize("age", ["release 3", "release 4", "release 6"])
@pytest.mark.parametrize("activation", ["Identity", "Sigmoid", "Softmax"])
def test_model_that_compares_two_texts_scores_and_cuts_as_it_was_saved(
    age: str, activation: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    save_encoder(source, "bert", "classify", num_labels=1, id2label={0: "score"})
    named = f"torch.nn.modules.{activation.lower()}.{activation}"
    if age == "release 3":
        edit_json(source / "config.json", sbert_ce_default_activation_function=named)
    elif age == "release 4":
        edit_json(source / "config.json", sentence_transformers={"activation_fn": named})
    else:
        of = "sentence_transformers.base.modules.transformer.Transformer"
        (source / "modules.json").write_text(
            json.dumps([{"idx": 0, "name": "0", "path": "", "type": of}])
        )
        around = {"model_type": "CrossEncoder", "activation_fn": named, "prompts": {}}
        (source / "config_sentence_transformers.json").write_text(json.dumps(around))
    (source / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 9}))

    assert limit_of(source) == 9
    expected = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}[activation]
    assert read_config(tmp_path / "checkpoint").model.head.label_scores == expected


def test_body_without_pooling_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save(source)
    modules = json.loads((source / "modules.json").read_text())
    (source / "modules.json").write_text(json.dumps(modules[:1]))

    with pytest.raises(CheckpointError, match="modules.json has no Pooling"):
        import_checkpoint(source, tmp_path / "checkpoint")


def test_model_in_a_folder_is_read_when_its_files_are_beside_the_modules(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save(source, sentence_bert_config={"max_seq_length": 6})
    folder = source / "0_Transformer"
    folder.mkdir()
    files = [path for path in source.iterdir() if path.is_file() and path.name != "modules.json"]
    for file in files:
        file.rename(folder / file.name)
    modules = json.loads((source / "modules.json").read_text())
    modules[0]["path"] = folder.name
    (source / "modules.json").write_text(json.dumps(modules))

    with pytest.raises(CheckpointError, match="its model in a folder, .* first folder"):
        import_checkpoint(source, tmp_path / "checkpoint")

    shutil.copytree(folder, source, dirs_exist_ok=True)
    assert limit_of(source) == 6
    torch.save({}, folder / "pytorch_model.bin")
    edit_json(folder / "config.json", layer_norm_eps=1e-5)
    with pytest.raises(CheckpointError, match=r"whose config\.json is another than that beside"):
        import_checkpoint(source, tmp_path / "other")


@pytest.mark.parametrize("activation", ["torch.nn.Tanh", "torch.nn.Softplus", "own.Sigmoid"])
def test_scores_that_we_cannot_make_are_refused(activation: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_encoder(source, "bert", "classify", num_labels=1, id2label={0: "score"})
    edit_json(source / "config.json", sentence_transformers={"activation_fn": activation})

    with pytest.raises(CheckpointError, match=f"is {activation}; supported: Identity, Sigmoid, So"):
        import_checkpoint(source, tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"config_args": {"hidden_act": "relu"}}, "config_args: hidden_act may change a vector"),
        ({"config_kwargs": {"hidden_act": "relu"}}, "config_kwargs: hidden_act may change a"),
        ({"tokenizer_args": {"truncation_side": "left"}}, "tokenizer_args: truncation_side may"),
        ({"processor_kwargs": {"model_max_length": 5}}, "processor_kwargs: model_max_length may"),
        ({"model_args": {"subfolder": "x"}}, "model_args: subfolder may change a vector"),
        ({"processing_kwargs": {"text": {}}}, "processing_kwargs: text may change a vector"),
        ({"transformer_task": "fill-mask"}, "transformer_task: "),
        ({"query_expansion": {"length": 4}}, "query_expansion: "),
        ({"modality_config": {"message": {"method": "forward"}}}, "modality_config.text: "),
        ({"modality_config": {"text": {"method": "get"}}}, "modality_config.text.method: "),
    ],
)
def test_options_that_change_a_vector_are_refused(
    options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save(tmp_path / "source", sentence_bert_config=options)

    with pytest.raises(CheckpointError, match=f"sentence_bert_config.json: {reason}"):
        import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")


def test_options_of_loading_change_no_vector(tmp_path: Path) -> None:
    loading = {"dtype": "float16", "attn_implementation": "sdpa"}
    options = {"max_seq_length": 6, "model_args": loading, "tokenizer_args": {}}
    save(tmp_path / "source", sentence_bert_config=options)

    assert limit_of(tmp_path / "source") == 6


@pytest.mark.parametrize(
    "name", ["modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"]
)
def test_link_that_leads_nowhere_is_refused(name: str, tmp_path: Path) -> None:
    save(tmp_path / "source")
    path = tmp_path / "source" / name
    path.unlink(missing_ok=True)
    path.symlink_to("../blobs/none")

    with pytest.raises(CheckpointError, match=rf"{name}: .*No such file"):
        import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")


@pytest.mark.parametrize("head", ["classify", "label"])
def test_labels_beside_modules_of_vectors_are_refused(head: str, tmp_path: Path) -> None:
    save_encoder(tmp_path / "source", "bert", head)
    save_sentence_modules(tmp_path / "source", "mean_tokens")

    with pytest.raises(CheckpointError, match="which has labels, and modules.json makes vectors"):
        import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")
