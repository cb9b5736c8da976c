"""Whatever `config.json` says, a model computes what transformers makes of it, or is refused."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedConfig, ViTImageProcessorPil
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engine.errors import CheckpointError
from exporter.checkpoint import load_checkpoint
from exporter.huggingface import FAMILIES, import_checkpoint
from exporter.huggingface.family import Family, Original, SpecialTokens
from tests.exporter.huggingface.decoders import DECODERS, LLAMA3, save_decoder
from tests.exporter.huggingface.encoders import NAMES, save_encoder, save_vision
from tests.exporter.huggingface.translation_sources import MODELS, save

LENGTH = 9
MASK = torch.arange(LENGTH) < torch.tensor([LENGTH, 4, 1])[:, None]

# Read from the generation options, or of training alone, or of heads and tables that are not ours.
CHANGES_NOTHING = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("forced_eos_token_id", "cls_token_id", "sep_token_id", "use_cache", "is_decoder"),
    *("init_std", "initializer_factor", "initializer_range", "initializer_cutoff_factor"),
    *("classifier_dropout", "embd_pdrop", "resid_pdrop", "mlp_dropout", "qa_dropout"),
    *("seq_classif_dropout", "layerdrop", "encoder_layerdrop", "decoder_layerdrop"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type"),
    *("summary_use_proj", "decoder_bias", "sparse_prediction", "sparse_pred_ignore_index"),
    *("encoder_stride", "pooler_act", "pooler_output_size", "deterministic_flash_attn"),
    *("sinusoidal_pos_embds", "reorder_and_upcast_attn", "pretraining_tp"),
}


def options_of(model_type: str) -> set[str]:
    """Return the options that transformers has for a family and not for every model."""
    theirs = CONFIG_MAPPING[model_type]
    settable = {
        name for name, kind in vars(theirs).items() if isinstance(kind, property) and kind.fset
    }
    fields = {field.name for field in dataclasses.fields(theirs)}
    common = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    return (fields - common) | settable | set(theirs.attribute_map)


# Options that are read as others, which transformers makes of them.
FOLDED = {"feed_forward_proj", "max_window_layers", "rope_scaling", "use_sliding_window"}
FOLDED |= {"original_max_position_embeddings", "sliding_window"}  # the latter of a ModernBERT


class Recorder:
    """A configuration that knows which of its options were read."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config, self.read = config, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.read.add(name)
        return getattr(self.config, name)


@pytest.mark.parametrize(
    ("family", "model_type"), [(one, name) for one in FAMILIES for name in one.model_types]
)
def test_every_option_of_transformers_is_read_or_changes_nothing(
    family: Family, model_type: str
) -> None:
    ends = "Model" if "generate" in family.abilities else "ForSequenceClassification"
    named = {"vit": "ViTForImageClassification", "deit": "DeiTForImageClassification"}
    config = Recorder(AutoConfig.for_model(model_type, architectures=[named.get(model_type, ends)]))
    pictures = ViTImageProcessorPil()

    family.read_config(Original(config, SpecialTokens(1, 0, 0), pictures=pictures))

    second = CONFIG_MAPPING[model_type].attribute_map
    unread = {second.get(name, name) for name in options_of(model_type)} - config.read - FOLDED
    if "embed" in family.abilities or model_type == "mt5":  # which ties nothing
        unread -= {"tie_word_embeddings"}
    assert unread <= CHANGES_NOTHING


@pytest.mark.parametrize(
    ("family", "options", "edits"),
    [
        ("gpt2", {}, {"n_head": None, "num_attention_heads": 4}),
        ("marian", {}, {"encoder_attention_heads": None, "num_attention_heads": 2}),
        ("t5", {}, {"d_kv": None, "head_dim": 12, "num_layers": None, "num_hidden_layers": 2}),
        ("m2m_100", {}, {"pad_token_id": 3}),
        ("t5", {}, {"dense_act_fn": "silu"}),
        ("t5", {"feed_forward_proj": "gated-silu"}, {"feed_forward_proj": "relu"}),
        ("distilbert", {}, {"n_heads": None, "num_attention_heads": 4}),
        ("distilbert", {}, {"layer_norm_eps": 0.1}),
        ("opt", {}, {"norm_eps": 0.1}),
        ("llama", {"rope_parameters": LLAMA3}, {"original_max_position_embeddings": 6}),
        ("modernbert", {}, {"sliding_window": 1}),
        ("llama", {}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
        ("gemma3_text", {}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ],
)
def test_an_option_that_counts_in_transformers_counts_here(
    family: str, options: dict[str, Any], edits: dict[str, Any], tmp_path: Path
) -> None:
    twin = _save(family, tmp_path / "source", **options)
    edit(tmp_path / "source" / "config.json", edits)

    ours = _ours(tmp_path / "source")

    expected = _theirs(type(twin).from_pretrained(tmp_path / "source", dtype="float32").eval())
    torch.testing.assert_close(ours, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize(
    ("family", "edits", "message"),
    [
        ("gpt2", {"num_attention_heads": 2}, "n_head is 4 and num_attention_heads 2; they are"),
        ("marian", {"hidden_size": 8}, "d_model is 16 and hidden_size 8; they are two names"),
        (
            "qwen2",
            {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}},
            "config.json: rope_type: Field required",
        ),
        ("gemma3_text", {"layer_types": ["full_attention"]}, "must be equal to the number of `la"),
        ("qwen2", {"layer_types": ["full_attention"]}, "must be equal to the number of `layer_t"),
        ("gemma3_text", {"attn_logit_softcapping": 2.0}, "is 2.0; supported: None"),
        ("t5", {"architectures": ["T5EncoderModel"]}, "T5EncoderModel, an encoder without the de"),
        (
            "bert",
            {"num_labels": 2**40, "id2label": None},
            "num_labels is 1099511627776; supported: 0 to 1,048,576",
        ),
        (
            "modernbert",
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "sliding_attention.rope_type is 'linear'; supported: 'default'",
        ),
    ],
)
def test_options_that_do_not_fit_are_named(
    family: str, edits: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _save(family, tmp_path / "source")
    edit(tmp_path / "source" / "config.json", edits)

    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")


def test_a_distilled_bart_may_still_have_the_number_of_layers_of_its_teacher(
    tmp_path: Path,
) -> None:
    twin = _save("bart", tmp_path / "source", encoder_layers=1, decoder_layers=2)
    edit(tmp_path / "source" / "config.json", {"num_hidden_layers": 12})

    torch.testing.assert_close(_ours(tmp_path / "source"), _theirs(twin), rtol=0, atol=5e-5)


@pytest.mark.parametrize("family", ["bert", "distilbert", "modernbert"])
@pytest.mark.parametrize("edits", [{"num_labels": 9}, {"num_labels": 7, "id2label": None}])
def test_labels_that_have_no_names_are_counted(
    family: str, edits: dict[str, Any], tmp_path: Path
) -> None:
    options = {} if "id2label" not in edits else {"id2label": None, "num_labels": 7}
    twin = _save(family, tmp_path / "source", **options)
    edit(tmp_path / "source" / "config.json", {"label2id": None, **edits})

    torch.testing.assert_close(_ours(tmp_path / "source"), _theirs(twin), rtol=0, atol=5e-5)
    labels = load_checkpoint(tmp_path / "checkpoint").config.model.labels
    assert list(labels) == list(twin.config.id2label.values())


def test_labels_may_be_numbers(tmp_path: Path) -> None:
    _save("bert", tmp_path / "source")
    edit(tmp_path / "source" / "config.json", {"id2label": {"0": 1, "1": 2, "2": 3.5, "3": "4"}})

    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")

    labels = load_checkpoint(tmp_path / "checkpoint").config.model.labels
    assert labels == ("1", "2", "3.5", "4")


def _save_labelled(kind: str, source: Path, config: dict[str, Any]) -> None:
    if kind == "picture":
        processor = ViTImageProcessorPil(size={"height": 8, "width": 8})
        save_vision(source, "ViTForImageClassification", processor)
    else:
        save_encoder(source, "bert", kind)
    edit(source / "config.json", config)


@pytest.mark.parametrize("kind", ["classify", "label", "picture"])
@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"1": "neg", "2": "pos"}, "id2label has no 0, it names 1, 2"),
        ({"0": "a", "2": "c"}, "id2label has no 1, it names 0, 2"),
        ({"0": "a", "-1": "b"}, "id2label has no 1, it names -1, 0"),
        ({}, "id2label has no 0, it names nothing"),
    ],
)
def test_labels_that_do_not_count_from_zero_are_refused(
    kind: str, names: dict[str, str], message: str, tmp_path: Path
) -> None:
    _save_labelled(kind, tmp_path / "source", {"id2label": names, "label2id": None})

    with pytest.raises(CheckpointError, match=message):
        import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")


@pytest.mark.parametrize("kind", ["classify", "label", "picture"])
def test_a_second_table_of_labels_that_contradicts_the_first_counts_for_nothing(
    kind: str, tmp_path: Path
) -> None:
    names = ["a", "b", "c", *(["d"] if kind != "picture" else [])]
    tables = {"id2label": dict(enumerate(names)), "label2id": {"a": 1, "b": 0, "c": 2}}
    _save_labelled(kind, tmp_path / "source", tables)

    import_checkpoint(tmp_path / "source", tmp_path / "checkpoint")

    labels = load_checkpoint(tmp_path / "checkpoint").config.model.labels
    theirs = AutoConfig.from_pretrained(tmp_path / "source").id2label
    assert dict(enumerate(labels)) == theirs


def test_labels_of_a_body_count_for_nothing(tmp_path: Path) -> None:
    save_encoder(tmp_path / "source", "bert", "embed")
    edit(tmp_path / "source" / "config.json", {"id2label": {"3": "x"}, "label2id": {"x": 1}})

    assert not import_checkpoint(tmp_path / "source", tmp_path / "checkpoint").notes


OTHER_NAMES = ("silu", "quick_gelu", "gated-silu", "relative_key", "cls")


@pytest.mark.long
@pytest.mark.parametrize("family", [*DECODERS, *MODELS, *NAMES])
def test_no_changed_option_changes_the_answers_of_transformers_alone(
    family: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    kind = type(_save(family, source))

    check_changes(
        source / "config.json",
        lambda: _ours(source),
        lambda: _theirs(kind.from_pretrained(source, dtype="float32").eval()),
    )


def check_changes(file: Path, ours: Callable[[], Tensor], theirs: Callable[[], Tensor]) -> None:
    """Change option after option of a config.json: both answer alike, or one refuses it."""
    text = file.read_text()
    saved = json.loads(text)
    wrong, num_changed = [], 0
    for name, value in _changes(saved, options_of(saved["model_type"])):
        if name == "num_hidden_layers" and "encoder_layers" in saved:
            continue  # both stand there: the weights say how many layers there are
        edit(file, {name: value})
        try:
            found, expected = ours(), theirs()
        except Exception:  # either refuses it
            continue
        finally:
            file.write_text(text)
        num_changed += 1
        if not torch.allclose(found, expected, rtol=0, atol=5e-5):
            wrong.append((name, value))
    assert wrong == []
    assert num_changed > 10


def edit(path: Path, changes: dict[str, Any]) -> None:
    """Change fields of a JSON file, and leave out those that are None."""
    changed = {**json.loads(path.read_text()), **changes}.items()
    path.write_text(json.dumps({name: value for name, value in changed if value is not None}))


def _changes(saved: dict[str, Any], names: set[str]) -> Iterator[tuple[str, Any]]:
    """Yield options with values that they do not have."""
    for name in sorted({*saved, *names} - {"architectures", "model_type", "return_dict"}):
        match saved.get(name):
            case bool(value):
                others: tuple[Any, ...] = (not value,)
            case int(value):
                others = (1, value + 1)
            case float(value):
                others = (2 * value + 0.1,)
            case str():
                others = OTHER_NAMES
            case None:
                others = (True, 2, 0.5)
            case _:
                others = ()
        yield from ((name, other) for other in others)


def _save(family: str, path: Path, **options: Any) -> Any:
    if family in DECODERS:
        return save_decoder(path, family, **options)
    if family in MODELS:
        return save(family, path, **options)
    return save_encoder(path, family, "classify", **options)


def _ids() -> Tensor:
    torch.manual_seed(2)
    return torch.randint(4, 20, (3, LENGTH))


@torch.no_grad()
def _ours(source: Path) -> Tensor:
    import_checkpoint(source, source.with_name("checkpoint"))
    model = load_checkpoint(source.with_name("checkpoint")).model
    ids, has_encoder = _ids(), model.config.num_encoder_layers > 0
    if not has_encoder:
        return model(ids)
    return model(ids, ids, MASK) if model.config.num_decoder_layers else model(ids, MASK)[0]


@torch.no_grad()
def _theirs(model: Any) -> Tensor:
    ids = _ids()
    if type(model).__name__.endswith("ForCausalLM") or "LMHead" in type(model).__name__:
        return model(ids).logits
    targets = {"decoder_input_ids": ids} if hasattr(model, "get_decoder") else {}
    return model(ids, MASK.long(), **targets).logits
