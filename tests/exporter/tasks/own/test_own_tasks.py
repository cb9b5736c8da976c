"""From a person's file to a checkpoint that does better than counting."""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.errors import ConfigError
from engine.requests.generation_defaults import GenerationDefaults
from engine.text.chat_format import ChatFormat
from exporter.checkpoint import TextFiles, load_checkpoint, save_checkpoint
from exporter.models import TransformerConfig, build_model
from exporter.tasks import build_own_task
from exporter.tasks.own.baseline import CommonestTag, WordByWord, commonest_label
from exporter.tasks.own.data import OwnData
from exporter.tasks.own.images import find_images
from exporter.tasks.own.labelling import read_sentences
from exporter.tasks.own.labels import better_than
from exporter.tasks.own.parts import Parts, divide
from exporter.tasks.own.subwords import frame, train_subwords
from exporter.tasks.own.translation import BOS, EOS
from exporter.training.data import IGNORED, Example
from exporter.training.evaluation import Evaluation
from exporter.training.trainer import train
from tests.exporter.conftest import OPTIONS
from tests.exporter.tasks.own.conftest import WORDS

FIXTURES = {
    "translation": "pairs",
    "classification": "texts",
    "labelling": "sentences",
    "images": "pictures",
}
CHAT = ChatFormat(template="{{ messages }}")
SLOW = pytest.mark.long
STEPS = {"translation": 200, "classification": 60, "labelling": 80, "images": 20}


@pytest.mark.parametrize(
    "name", ["classification", "labelling", "images", pytest.param("translation", marks=SLOW)]
)
def test_a_model_learns_more_than_counts_say_and_a_second_one_starts_from_it(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    data = OwnData(request.getfixturevalue(FIXTURES[name]))

    def run(data: OwnData, out: Path, steps: int) -> float:
        report = train(lambda seed: build_own_task(name, data, seed=seed), out, steps=steps)
        assert report.target_reached, report.summary
        return report.metrics["loss"]

    first = run(data, tmp_path / "first", STEPS[name])
    started = replace(data, start=load_checkpoint(tmp_path / "first"))
    second = run(started, tmp_path / "second", 2)

    assert second < first * 1.5  # far from what fresh weights have after two steps
    tokenizers = [load_checkpoint(tmp_path / run).tokenizer for run in ("first", "second")]
    one, other = (None if t is None else t.to_str() for t in tokenizers)
    assert one == other


def test_a_translation_keeps_what_its_start_says_of_generation(pairs: Path, tmp_path: Path) -> None:
    fresh = build_own_task("translation", OwnData(pairs))
    defaults = GenerationDefaults(beam=4, banned_tokens=(3,))
    model = build_model(fresh.config)
    save_checkpoint(tmp_path / "first", "mine", model, fresh.tokenizer, generation=defaults)

    start = load_checkpoint(tmp_path / "first")
    task = build_own_task("translation", OwnData(pairs, start=start))
    train(lambda seed: task, tmp_path / "second", steps=1)

    assert load_checkpoint(tmp_path / "second").config.generation == defaults


def test_translations_are_compared_with_references_as_texts(pairs: Path, tmp_path: Path) -> None:
    data = OwnData(pairs)

    report = train(
        lambda seed: build_own_task("translation", data, seed=seed),
        tmp_path / "run",
        steps=20,
    )

    assert 0 < report.metrics["chrf"] < 100
    assert "chrF of copying" in report.summary and "word by word" in report.summary
    source, target = report.samples[0]
    row = f"{source}\t{target}"
    assert row in pairs.read_text().splitlines()


def test_a_head_for_other_labels_is_drawn_afresh(texts: Path, tmp_path: Path) -> None:
    def build(data: OwnData, out: Path) -> None:
        train(
            lambda seed: build_own_task("classification", data, seed=seed),
            out,
            steps=1,
        )

    build(OwnData(texts), tmp_path / "first")
    renamed = tmp_path / "three.tsv"
    rows = texts.read_text().splitlines()
    renamed.write_text("\n".join(rows[:400] + [row + str(i % 3) for i, row in enumerate(rows)]))
    start = load_checkpoint(tmp_path / "first")
    task = build_own_task("classification", OwnData(renamed, start=start))

    assert len(task.config.labels) == 8
    assert "classifier.weight" not in task.initial_weights
    build(OwnData(renamed, start=start), tmp_path / "second")
    second = load_checkpoint(tmp_path / "second").model
    assert second.get_parameter("classifier.weight").shape[0] == 8
    token = "embeddings.token.weight"
    near = torch.allclose(second.get_parameter(token), start.model.get_parameter(token), atol=0.01)
    assert near


def test_a_start_of_another_family_is_refused(texts: Path, pairs: Path, tmp_path: Path) -> None:
    fresh = build_own_task("translation", OwnData(pairs))
    save_checkpoint(tmp_path / "first", "mine", build_model(fresh.config), fresh.tokenizer)
    start = load_checkpoint(tmp_path / "first")

    with pytest.raises(
        ConfigError, match="of the architecture encoder-decoder, this task starts from e"
    ):
        build_own_task("classification", OwnData(texts, start=start))


# The usual start: a body that was trained on texts without labels, and embeds.
EMBEDS = {
    "labels": (),
    "head.pooler": "linear",
    "head.embedding_dim": 8,
    "head.normalize": True,
    "cut_at": 9,
}


@pytest.mark.parametrize(
    ("task", "fixture", "before"),
    [
        ("labelling", "sentences", {}),
        ("labelling", "sentences", {**EMBEDS, "num_token_types": 2}),
        ("labelling", "sentences", {"head.each_token": True, "labels": ("x", "y", "z")}),
        ("classification", "texts", {"head.each_token": True, "labels": ("x", "y")}),
        ("classification", "texts", EMBEDS),
        ("classification", "texts", {"labels": ("x", "y"), "head.label_scores": "sigmoid"}),
    ],
)
def test_a_model_of_texts_starts_from_any_other_under_a_new_head(
    task: str,
    fixture: str,
    before: dict[str, object],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    data = OwnData(request.getfixturevalue(fixture))
    fresh = build_own_task("classification", OwnData(request.getfixturevalue("texts")))
    told = fresh.config.changed(before)
    save_checkpoint(tmp_path / "first", "mine", build_model(told), fresh.tokenizer)
    start = load_checkpoint(tmp_path / "first")

    started = build_own_task(task, replace(data, start=start))
    train(lambda seed: started, tmp_path / "second", steps=1)

    second = load_checkpoint(tmp_path / "second").model
    assert second.config.labels == build_own_task(task, data).config.labels
    assert second.config.head.label_scores == "softmax"
    assert second.config.cut_at is None
    assert not any(name.startswith("classifier") for name in started.initial_weights)
    for name in ("embeddings.token.weight", "encoder.layers.0.self_attention.q_proj.weight"):
        kept = start.model.get_parameter(name)
        assert torch.allclose(second.get_parameter(name), kept, atol=0.01)


@pytest.mark.parametrize("is_forced", [True, False])
def test_a_start_with_two_tokenizers_keeps_both_and_writes_with_the_second(
    pairs: Path, tmp_path: Path, is_forced: bool
) -> None:
    fresh = build_own_task("translation", OwnData(pairs))
    assert fresh.tokenizer is not None
    targets = train_subwords(WORDS.values(), 300, (BOS, EOS))
    frame(targets, f"{BOS} $A {EOS}", (BOS, EOS))  # as a source of another language
    forced = (targets.token_to_id("z"),) if is_forced else ()
    model, text = build_model(fresh.config), TextFiles(target_tokenizer=targets, chat=CHAT)
    generation = GenerationDefaults(forced_begin=forced)
    save_checkpoint(tmp_path / "first", "mine", model, fresh.tokenizer, (), generation, text)
    start = load_checkpoint(tmp_path / "first")

    task = build_own_task("translation", OwnData(pairs, start=start))
    train(lambda seed: task, tmp_path / "second", steps=1)

    example, (source, target) = task.held_out[0], task.samples[0]
    assert example.source.tolist() == fresh.tokenizer.encode(source).ids
    plain = targets.encode(target, add_special_tokens=False).ids
    assert example.target.tolist() == [*forced, *plain, targets.token_to_id(EOS)]
    second = load_checkpoint(tmp_path / "second")
    assert second.text.target_tokenizer is not None and second.text.chat == CHAT
    assert second.text.target_tokenizer.to_str() == targets.to_str()
    again = OwnData(pairs, start=replace(start, text=TextFiles(targets)))
    assert build_own_task("translation", again).data_fingerprint != task.data_fingerprint


def test_more_examples_are_drawn_at_a_time_than_fill_a_batch_but_few_pictures() -> None:
    examples = [Example(np.array([1]), np.array([1]))] * 20_000
    data = OwnData(Path(__file__))  # only its digest is asked for

    def drawn(family: str) -> int:
        config = TransformerConfig.of(OPTIONS[family])
        parts = Parts(examples, examples[:10], examples[:10])
        judge = better_than(0.5, "texts", "a guess")
        task = data.task("mine", 0, config, None, parts, selection="exact_match", judge=judge)
        return len(task.chunks(0))

    assert drawn("bert") > 16_000
    assert drawn("vit") <= 1024


def test_every_token_of_a_word_has_the_words_tag(sentences: Path) -> None:
    task = build_own_task("labelling", OwnData(sentences))
    assert task.tokenizer is not None
    words, tags = task.samples[0]

    example = task.held_out[0]

    assert task.tokenizer.encode(words).ids == example.source.tolist()  # as a server encodes it
    encoding = task.tokenizer.encode(words.split(), is_pretokenized=True)
    wanted = [tags.split()[i] for i in encoding.word_ids if i is not None]
    assert [task.config.labels[i] for i in example.target] == wanted
    assert IGNORED not in example.target


def test_a_labeller_and_its_rival_are_counted_by_tokens(sentences: Path, tmp_path: Path) -> None:
    sentences.write_text("".join(f"one A\ntwo A\nsix{i} B\n\n" for i in range(40)))
    judged = tmp_path / "judged.conll"
    judged.write_text("".join(f"one A\nqzxwvkj{i} B\n\n" for i in range(60)))

    task = build_own_task("labelling", OwnData(sentences, validation=judged))

    baseline = task.judge(Evaluation(1, 1, 1.0, 1, 1)).metrics["baseline"]
    assert 0 < baseline < 0.3  # half of the words, of which the wrong ones have more tokens


def test_sentences_are_read_with_the_last_column_and_wrong_lines_named(tmp_path: Path) -> None:
    path = tmp_path / "a.conll"
    path.write_text("-DOCSTART- O\n\n# a remark\nEU NNP B-ORG\n# NN O\n\n\nso ADV O\n")
    assert read_sentences(path) == [(("EU", "B-ORG"), ("#", "O")), (("so", "O"),)]

    path.write_text("EU B-ORG\nrejects\n")
    with pytest.raises(ConfigError, match=r"1 of 2 lines are wrong: line 2: 'rejects' has no tag"):
        read_sentences(path)


def test_files_that_are_no_pictures_are_named(pictures: Path) -> None:
    broken = pictures / "dark" / "broken.png"
    broken.write_bytes(b"no picture")

    with pytest.raises(ConfigError, match=r"1 pictures cannot be read: .*broken\.png"):
        build_own_task("images", OwnData(pictures))

    learned, _, held_out = divide(find_images(pictures), lambda one: f"{one.label}/{one.path.name}")
    for image in (learned[0], held_out[0]):
        image.path.write_bytes(b"broken, too")
    with pytest.raises(ConfigError, match="3 pictures cannot be read") as refused:
        build_own_task("images", OwnData(pictures))
    assert all(str(image.path) in str(refused.value) for image in (learned[0], held_out[0]))


def test_hidden_pictures_are_not_of_a_class(pictures: Path) -> None:
    wanted = find_images(pictures)
    (pictures / ".ipynb_checkpoints").mkdir()
    for hidden in (".ipynb_checkpoints/1-checkpoint.png", "dark/._1.png"):
        shutil.copy(wanted[0].path, pictures / hidden)

    assert find_images(pictures) == wanted


def test_a_class_is_the_folder_of_the_directory_at_any_depth(pictures: Path) -> None:
    (pictures / "dark" / "bright").mkdir()
    (pictures / "dark" / "1.png").rename(pictures / "dark" / "bright" / "1.png")
    (pictures / "night").symlink_to(pictures / "dark")

    found = find_images(pictures)

    assert Counter(one.label for one in found) == {"bright": 120, "dark": 120, "night": 120}


@pytest.mark.parametrize("folder", ["dark", "other"])
def test_pictures_of_kinds_that_are_not_read_are_named(folder: str, pictures: Path) -> None:
    (pictures / folder).mkdir(exist_ok=True)
    (pictures / folder / "1.WebP").write_bytes(b"RIFF")

    with pytest.raises(ConfigError, match=rf"1 pictures are not PNG or JPEG.*{folder}/1\.WebP"):
        find_images(pictures)


def test_a_folder_without_pictures_is_no_class_and_named(pictures: Path) -> None:
    (pictures / "empty").mkdir()

    with pytest.raises(ConfigError, match=r"has folders without \.png, .* files: empty; put"):
        find_images(pictures)


def test_a_directory_without_folders_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no folders with .png"):
        find_images(tmp_path)


def test_words_that_are_numbered_are_not_taken_for_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.conllu"
    path.write_text("# text = zum Haus\n1-2\tzum\t_\n1\tzu\tADP\n2\tdem\tDET\n\n1\tJa\tINTJ\n")

    with pytest.raises(ConfigError, match=f"as in CoNLL-U; .* `cut -f 2,4 {path}`"):
        read_sentences(path)


def test_a_label_that_is_only_judged_by_is_refused(texts: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.tsv"
    other.write_text("".join(f"one {i}\tBIRD\n" for i in range(100)))

    with pytest.raises(ConfigError, match="no example to learn from has the label 'BIRD'"):
        build_own_task("classification", OwnData(texts, validation=other))


def test_a_pair_longer_than_the_model_is_left_out_and_counted(pairs: Path) -> None:
    with pairs.open("a") as file:
        file.write(f"{'x' * 100_000}\tlong\n")
        file.write(f"short\t{'cat ' * 300}\n")

    task = build_own_task("translation", OwnData(pairs))

    assert "; 2 longer than the model allows are left out" in task.data_summary
    assert max(len(example.target) for example in task.chunks(0)) <= task.config.max_target_len


def test_baselines_count() -> None:
    assert commonest_label(["a", "a", "b"], ["a", "b", "b", "b"]) == 0.25
    tags = CommonestTag([[("x", "A"), ("x", "A"), ("x", "B"), ("y", "B")]])
    assert tags.accuracy([[("x", "A"), ("y", "A"), ("new", "A"), ("y", "B")]]) == 0.75
    dictionary = WordByWord([("red cat", "rote Katze"), ("red dog", "rot Hund"), ("cat", "Katze")])
    assert dictionary.translate("cat bird") == "Katze bird"


def test_data_that_changed_are_not_gone_on_with(texts: Path) -> None:
    before = build_own_task("classification", OwnData(texts)).data_fingerprint
    texts.write_text(texts.read_text() + "big cat\tCAT\n")

    assert build_own_task("classification", OwnData(texts)).data_fingerprint != before
