"""Two forms of a model that answers in one pass, compared on texts and pictures."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from engine.errors import ConfigError
from exporter.checkpoint import load_checkpoint
from exporter.compare.items import read_images
from exporter.compare.sides import generates, open_side
from exporter.compare.two_models import compare
from server.cli.app import run
from tests.exporter.compare.test_writing import changed
from tests.exporter.conftest import MakeCheckpoint
from tests.parity.conftest import Exported, export_unproven

TEXTS = {
    "bert": "w3 w4\tgood\nw9\tbad\n\nw7 w8 w3\tw5 w6\tfair\n",  # the last is a pair
    "labeller": "w3 w4 w5\tNOUN VERB NOUN\nw9 w3\tVERB VERB\nw7 w8 w3 w4\n",
}
NUM_ANSWERS = {"bert": 3, "labeller": 9, "vit": 3}


@pytest.fixture(scope="module")
def exported(make_checkpoint: MakeCheckpoint) -> Callable[..., Exported]:
    @functools.cache
    def make(family: str) -> Exported:
        return export_unproven(make_checkpoint(family))

    return make


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for name in ("1/a.png", "1/b.PNG", "elsewhere/c.png"):
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (6, 5), np.uint8)).save(path)
    (tmp_path / "pictures" / "notes.txt").write_text("no picture")
    return tmp_path / "pictures"


@pytest.mark.parametrize(
    "family", ["bert", pytest.param("labeller", marks=pytest.mark.long), "vit"]
)
def test_a_package_answers_as_its_checkpoint_does(
    family: str, exported: Callable[..., Exported], pictures: Path, tmp_path: Path
) -> None:
    checkpoint, package = exported(family)
    text = tmp_path / "text"
    text.write_text(TEXTS.get(family, ""))
    given = {"images": pictures} if family == "vit" else {"text": text}

    found = compare(checkpoint.path, package, **given)

    assert found.items == found.items_equal == 3 and found.first is None
    assert found.answers == found.answers_equal == NUM_ANSWERS[family] and found.answer_loss == 0
    assert list(found.quantiles["scores"]) == ["50%", "90%", "99%", "100%"]
    assert 0 < found.quantiles["scores"]["100%"] < 1e-4
    assert found.one.accuracy == found.other.accuracy and found.accuracy_loss == 0
    assert found.references == {"bert": 3, "labeller": 5, "vit": 2}[family]
    assert found.other.num_bytes == sum(file.stat().st_size for file in package.iterdir())
    assert np.isfinite(found.one.per_second)


def test_accuracy_is_the_share_of_references_that_are_told(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    path = make_checkpoint("labeller")
    model = load_checkpoint(path).model
    with torch.no_grad():
        told = model(torch.tensor([[9, 3, 7]])).logits[0].argmax(-1).tolist()
    right = [("NOUN", "VERB")[i] for i in told]
    tags = [right[0], right[1], "NOUN" if right[2] == "VERB" else "VERB"]
    (tmp_path / "text").write_text(f"w9  w3 w7\t{' '.join(tags)}\n")

    found = compare(path, path, tmp_path / "text")

    assert found.one.accuracy == found.other.accuracy == pytest.approx(2 / 3)


def test_a_changed_model_is_seen_where_it_answers_otherwise(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("labeller")
    other = changed(checkpoint, tmp_path / "other", "classifier.weight", -1)
    (tmp_path / "text").write_text(TEXTS["labeller"])

    found = compare(checkpoint, other, tmp_path / "text")

    assert found.answers_equal < found.answers == 9 and found.items_equal < 3
    assert found.answer_loss == pytest.approx(1 - found.answers_equal / 9)
    assert found.first is not None and found.first.where.startswith("line ")
    one, two = found.first.texts
    assert one.partition(" ")[0] != two.partition(" ")[0] and "w" in found.first.where
    assert found.one.accuracy is not None and found.other.accuracy is not None
    assert found.accuracy_loss == found.one.accuracy - found.other.accuracy


def test_vectors_are_compared_by_the_angle_between_them(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("bert", labels=())
    scaled = changed(checkpoint, tmp_path / "scaled", "pooler.weight", 1)
    other = changed(checkpoint, tmp_path / "other", "pooler.weight", 0.5)
    (tmp_path / "text").write_text("w3 w4\nw9\tw8\nw5 w6 w7\n")

    same = compare(checkpoint, scaled, tmp_path / "text")
    found = compare(checkpoint, other, tmp_path / "text")

    assert same.answer_loss == 0 and same.items_equal == 3 and list(same.quantiles) == ["vectors"]
    assert found.items_equal == 0 and 1e-3 < found.answer_loss < 1
    assert found.quantiles["vectors"]["100%"] == found.answer_loss
    assert found.first is not None and found.first.where == "line 1"
    assert found.first.texts[1].startswith("cosine 0.") and found.one.accuracy is None


@pytest.mark.parametrize(("scores", "labels"), [("sigmoid", ("a", "b", "c")), ("none", ("x",))])
def test_sets_of_labels_and_numbers_are_answers_too(
    scores: str, labels: tuple[str, ...], make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint("bert", labels=labels, **{"head.label_scores": scores})
    other = changed(checkpoint, tmp_path / "other", "classifier.weight", -3)
    reference = "\ta, c\n" if scores == "sigmoid" else "\n"
    (tmp_path / "text").write_text(f"w3 w4{reference}w9{reference}w7{reference}")

    same = compare(checkpoint, checkpoint, tmp_path / "text")
    found = compare(checkpoint, other, tmp_path / "text")

    assert same.answer_loss == 0 and same.answers_equal == 3
    assert found.answers_equal < 3 and found.answer_loss > 0
    assert (found.one.accuracy is None) == (scores == "none")


@pytest.mark.parametrize("family", ["bert", "labeller", "vit"])
def test_without_texts_or_pictures_random_ones_are_tried(
    family: str, make_checkpoint: MakeCheckpoint
) -> None:
    checkpoint = make_checkpoint(family)

    found = compare(checkpoint, checkpoint)

    assert found.items >= 16 and found.items_equal == found.items
    assert found.one.accuracy is None and found.references == 0


@pytest.mark.parametrize(
    ("family", "text", "message"),
    [
        ("bert", "w3\tgood\nw4\tgreat\n", r"line 2: 'great' is none of bad, fair, good"),
        ("bert", "w3\tgood\tfair\tbad\n", "line 1: 4 columns are more than 3"),
        ("bert", "w3\n" + "w4 " * 10, "line 2: 10 tokens are more than 9"),
        ("bert", "\n \n", "has no lines"),
        ("labeller", "w3 w4\tNOUN\n", "line 1: 1 labels for 2 words"),
        ("labeller", "w3\tNOUN\nw4\tADJ\nw5\tADV\n", "line 2: 'ADJ' .*line 3: 'ADV' is none of"),
    ],
)
def test_lines_that_cannot_be_used_are_named(
    family: str, text: str, message: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(family)
    (tmp_path / "text").write_text(text)

    with pytest.raises(ConfigError, match=message):
        compare(checkpoint, checkpoint, tmp_path / "text")


def test_long_line_is_refused_unless_the_model_cuts_it(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    plain, cutting = make_checkpoint("bert"), make_checkpoint("bert", cut_at=3)
    (tmp_path / "text").write_text(f"w3 {'w4 ' * 20}\tgood\n")

    with pytest.raises(ConfigError, match="21 tokens are more than"):
        compare(plain, plain, tmp_path / "text")
    assert compare(cutting, cutting, tmp_path / "text").answers_equal == 1


def test_texts_and_pictures_go_to_models_that_take_them(
    make_checkpoint: MakeCheckpoint, pictures: Path, tmp_path: Path
) -> None:
    texts, images = make_checkpoint("bert"), make_checkpoint("vit")
    (tmp_path / "text").write_text("w3\n")
    (pictures / "1" / "broken.png").write_bytes(b"broken")

    with pytest.raises(ConfigError, match="takes texts, not pictures; give --text"):
        compare(texts, texts, images=pictures)
    with pytest.raises(ConfigError, match="takes pictures, not texts; give --images"):
        compare(images, images, tmp_path / "text")
    with pytest.raises(ConfigError, match=r"1/broken\.png: 6 bytes that start with"):
        compare(images, images, images=pictures)
    with pytest.raises(ConfigError, match=r"has no \.png, \.jpg, \.jpeg files"):
        compare(images, images, images=texts)


def test_a_picture_has_its_class_as_in_training_and_hidden_ones_are_left_out(
    make_checkpoint: MakeCheckpoint, pictures: Path
) -> None:
    contract = open_side(make_checkpoint("vit")).contract
    for place in (".thumbnails/1.png", "1/._1.png", "1/2/c.png", "elsewhere/1/d.png", "e.png"):
        (pictures / place).parent.mkdir(exist_ok=True)
        shutil.copy(pictures / "1" / "a.png", pictures / place)

    found = read_images(pictures, contract)

    assert {item.where: item.reference for item in found} == {
        **dict.fromkeys(("1/a.png", "1/b.PNG", "1/2/c.png"), ("1",)),
        **dict.fromkeys(("elsewhere/c.png", "elsewhere/1/d.png", "e.png")),
    }
    (pictures / "1" / "f.gif").write_bytes(b"GIF89a")
    (pictures / "1" / "a.png").unlink()
    (pictures / "1" / "a.png").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="1 pictures are not PNG or JPEG"):
        read_images(pictures, contract)
    (pictures / "1" / "f.gif").unlink()
    with pytest.raises(ConfigError, match="1/a.png: No such file"):
        read_images(pictures, contract)


def test_other_models_are_refused(make_checkpoint: MakeCheckpoint) -> None:
    one, other, third = (
        make_checkpoint("bert"),
        make_checkpoint("bert", labels=("good", "bad")),
        make_checkpoint("gpt"),
    )

    with pytest.raises(ConfigError, match="differ in their labels"):
        compare(one, other)
    with pytest.raises(ConfigError, match="holds a model that generates; give two that do, or"):
        compare(one, third)
    with pytest.raises(ConfigError, match="holds a model that does not generate; give two that do"):
        compare(third, one)
    assert generates(third) and not generates(one)


def test_the_command_compares_answers(
    make_checkpoint: MakeCheckpoint, pictures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = str(make_checkpoint("vit"))

    assert run(["diff", checkpoint, checkpoint, "--images", str(pictures)]) == 0

    out = capsys.readouterr().out
    assert "3 of 3 (100.00%)" in out and "accuracy on 2 references" in out


def test_both_may_be_packages(exported: Callable[..., Exported]) -> None:
    package = exported("vit").package

    found = compare(package, package)

    assert found.answer_loss == 0 and not generates(package)
