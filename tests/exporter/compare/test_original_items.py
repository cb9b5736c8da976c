"""Labels, their scores and pictures are those of the original; a wrong import is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from engine.errors import CheckpointError
from exporter.checkpoint import read_config
from exporter.imports import import_model
from tests.exporter.compare.test_original import import_wrongly, options, save_drawn
from tests.exporter.huggingface.families.test_vision import DEIT, VIT
from tests.exporter.huggingface.sources import edit_json

OTHERS = ("B-LOC", "O", "I-LOC", "B-ORG")
WRONG: dict[str, tuple[str, dict[str, Any], Any, str]] = {
    "labels swapped": (
        "bert",
        {},
        options("labels", OTHERS),
        "it has other labels: ('B-LOC', 'O', ",
    ),
    "labels of tokens swapped": (
        "bert",
        {"head": "label"},
        options("labels", OTHERS),
        "it has other labels: ('B-LOC', 'O', 'I-LOC', 'B-ORG'), there ['O', 'B-LOC', ",
    ),
    "a sigmoid for a softmax": (
        "bert",
        {},
        options("head.label_scores", "sigmoid"),
        "scores of labels are made of logits by sigmoid: 0.9526 of 3.0, there 0.8650",
    ),
    "a softmax for a sigmoid": (
        "vit",
        {"problem_type": "multi_label_classification"},
        options("head.label_scores", "softmax"),
        "scores of labels are made of logits by softmax",
    ),
    "a sigmoid for what sentence-transformers leaves": (
        "bert",
        {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
        options("head.label_scores", "sigmoid"),
        "scores of labels are made of logits by sigmoid: 0.9526 of 3.0, there 3.0000",
    ),
    "mean of pixels": (
        "vit",
        {},
        options("image.mean", [0.1, 0.2, 0.3]),
        "a picture of 8 x 8 is read in another way",
    ),
    "filter that resizes": (
        "vit",
        {},
        options("image.resample", "nearest"),
        "a picture of 11 x 7 is read in another way",
    ),
    "size before the crop": (
        "deit",
        {},
        options("image.resize", 9),
        "a picture of 8 x 8 is read in another way",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_import_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, given, change, said = WRONG[name]
    save_drawn(family, tmp_path / "original", **given)
    import_wrongly(monkeypatch, change)

    with pytest.raises(CheckpointError, match=re.escape(said)):
        import_model(tmp_path / "original", tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("given", "scores"),
    [
        ({}, "softmax"),
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"problem_type": "regression"}, "none"),
        ({"id2label": {0: "cat"}}, "sigmoid"),
    ],
)
@pytest.mark.parametrize("family", ["vit", "bert"])
def test_labels_are_scored_as_by_the_pipeline(
    family: str, given: dict[str, Any], scores: str, tmp_path: Path
) -> None:
    save_drawn(family, tmp_path / "original", **given)

    _, said = import_model(tmp_path / "original", tmp_path / "checkpoint")

    model = read_config(tmp_path / "checkpoint").model
    assert model.head.label_scores == scores
    assert f", {len(model.labels)} label" in said


@pytest.mark.parametrize(
    ("family", "named", "processor"),
    [
        ("vit", "ViTFeatureExtractor", VIT),
        ("vit", None, VIT),
        ("vit", "ViTImageProcessorFast", VIT),
        ("deit", "DeiTImageProcessorPil", DEIT),
        ("deit", "DeiTFeatureExtractor", DEIT),
    ],
)
def test_pictures_are_read_as_by_the_processor_under_any_name_of_it(
    family: str, named: str | None, processor: Any, tmp_path: Path
) -> None:
    save_drawn(family, tmp_path / "original")
    path = tmp_path / "original" / "preprocessor_config.json"
    key = "feature_extractor_type" if named and "Feature" in named else "image_processor_type"
    edit_json(path, image_processor_type=None)
    edit_json(path, **{key: named})

    _, said = import_model(tmp_path / "original", tmp_path / "checkpoint")

    assert said.startswith("compared with ") and said.endswith("3 labels, 3 resized pictures")


def test_an_image_processor_that_transformers_does_not_load_is_told(tmp_path: Path) -> None:
    save_drawn("vit", tmp_path / "original")
    edit_json(tmp_path / "original" / "preprocessor_config.json", image_processor_type="Own")

    imported, said = import_model(tmp_path / "original", tmp_path / "checkpoint")

    assert said.startswith("compared with ") and "labels" not in said
    assert "labels and pictures are not compared with those of its original" in imported.notes[-1]
