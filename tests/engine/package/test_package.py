"""load_package: a sound package loads, every kind of wrong one is refused with the reason."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from engine.errors import PackageError
from engine.package.manifest import FORMAT_VERSION, Answers, Judged, Loss, PackageFormat, Weights
from engine.package.package import load_package, read_manifest, seal
from engine.session import create_session
from tests.fakes.stand_in_certificate import LOSS, certificate, judged, quantiles

FILES = {
    "decoder.onnx": b"decoder graph",
    "decoder.onnx.data": b"decoder weights" * 10,
    "encoder.onnx": b"encoder graph",
    "tokenizer.json": b"{}",
    "config.json": b"{}",
}
CACHE = {"num_layers": 2, "num_kv_heads": 2, "max_len": 16, "head_dim": 8}
GENERATION = {
    "vocab_size": 20,
    "num_heads": 2,
    "cache": CACHE,
    "cross_cache": CACHE,
    "decoder_start_token_id": 1,
    "eos_token_ids": [2],
}

Change = Callable[[dict[str, Any]], None]


def _manifest(files: dict[str, bytes]) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "name": "dates",
        "version": "1",
        "architecture": "encoder-decoder",
        "task": "generate",
        "target": "cpu",
        "layout": "slots",
        "weights": "fp32",
        "generation": dict(GENERATION),
        "files": {
            name: {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
            for name, content in files.items()
        },
        "toolchain": {"torch": "2"},
        "certificate": certificate(covered={"steps": 32}).model_dump(mode="json"),
    }


def write_package(directory: Path, change: Change = lambda manifest: None) -> Path:
    directory.mkdir(exist_ok=True)
    for name, content in FILES.items():
        (directory / name).write_bytes(content)
    manifest = _manifest(FILES)
    change(manifest)
    (directory / "manifest.json").write_bytes(seal(manifest))
    return directory


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write_package(tmp_path / "package")


def _refusal(directory: Path) -> str:
    with pytest.raises(PackageError) as caught:
        load_package(directory)
    return str(caught.value)


def test_sound_package_loads(package: Path) -> None:
    found = load_package(package)

    assert found.manifest.name == "dates"
    assert found.file("decoder.onnx").read_bytes() == FILES["decoder.onnx"]
    raw = (package / "manifest.json").read_bytes()
    assert found.manifest_sha256 == hashlib.sha256(raw).digest()
    with pytest.raises(PackageError, match=r"lists no model\.onnx"):
        found.file("model.onnx")


def test_package_behind_a_link_to_its_directory_loads_from_where_it_is(
    package: Path, tmp_path: Path
) -> None:
    (tmp_path / "current").symlink_to(package)

    assert load_package(tmp_path / "current").path == package.resolve()


@pytest.mark.parametrize("name", list(FILES))
def test_one_flipped_bit_is_refused(package: Path, name: str) -> None:
    content = bytearray(FILES[name])
    content[len(content) // 2] ^= 1
    (package / name).write_bytes(content)

    message = _refusal(package)

    assert name in message and "damaged" in message and "export it again" in message


def test_file_cut_short_is_refused_with_both_sizes(package: Path) -> None:
    (package / "decoder.onnx.data").write_bytes(FILES["decoder.onnx.data"][:-1])

    message = _refusal(package)

    assert "149 bytes" in message and "expected 150 bytes" in message


def test_file_that_is_larger_than_it_should_be_is_refused_unread(package: Path) -> None:
    with (package / "decoder.onnx.data").open("r+b") as file:
        file.truncate(2**42)  # takes no room on disk; to hash it would take an hour

    assert f"{2**42} bytes, expected 150 bytes" in _refusal(package)


def test_pipe_in_place_of_a_file_is_refused_at_once(package: Path) -> None:
    for name in ("decoder.onnx", "manifest.json"):
        (package / name).unlink()
        os.mkfifo(package / name)

        assert f"{name} is not a file" in _refusal(package)


def _rewrite(path: Path) -> None:
    """Change a file in its place, and pretend that it was not."""
    before = path.stat()
    path.write_bytes(b"x" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _swap(path: Path) -> None:
    """Put another file in the place of one, and pretend that it was always there."""
    before, other = path.stat(), path.with_name("other")
    other.write_bytes(b"x" * before.st_size)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


def _swap_for_a_while(path: Path) -> None:
    path.rename(path.with_name("hidden"))
    path.write_bytes(b"what was loaded")
    path.with_name("hidden").rename(path)


@pytest.mark.parametrize("change", [_rewrite, _swap, _swap_for_a_while, Path.unlink])
def test_file_that_changes_after_it_was_hashed_is_found(
    package: Path, change: Callable[[Path], None]
) -> None:
    found = load_package(package)
    found.check_unchanged()

    change(package / "decoder.onnx.data")

    with pytest.raises(PackageError, match="was changed while the package was loaded"):
        found.check_unchanged()


def test_directory_that_is_swapped_for_a_while_is_found(package: Path) -> None:
    found = load_package(package)

    package.rename(package.with_name("hidden"))
    write_package(package)
    package.rename(package.with_name("loaded"))
    package.with_name("hidden").rename(package)

    with pytest.raises(PackageError, match="was changed while the package was loaded"):
        found.check_unchanged()


@pytest.mark.parametrize("name", [*FILES, "manifest.json"])
def test_missing_file_is_refused(package: Path, name: str) -> None:
    (package / name).unlink()

    assert name in _refusal(package)


def test_missing_directory_and_plain_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    assert f"there is no {tmp_path / 'nothing'}" in _refusal(tmp_path / "nothing")
    assert f"{tmp_path / 'file'} is a file, and no model" in _refusal(tmp_path / "file")


@pytest.mark.parametrize("name", ["decoder.onnx.data", "manifest.json"])
def test_link_is_refused_even_to_the_same_bytes(package: Path, tmp_path: Path, name: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    (package / name).rename(elsewhere)
    (package / name).symlink_to(elsewhere)

    assert f"{name} is a link" in _refusal(package)


def test_package_of_files_with_other_names_too_loads(package: Path, tmp_path: Path) -> None:
    """As backups and stores that keep equal files once make it."""
    shutil.copytree(package, tmp_path / "snapshot", copy_function=os.link)

    load_package(tmp_path / "snapshot").check_unchanged()


def test_link_to_nothing_and_directory_in_place_of_a_file_are_refused(package: Path) -> None:
    (package / "config.json").unlink()
    (package / "config.json").symlink_to("nowhere")
    assert "config.json is a link" in _refusal(package)

    (package / "config.json").unlink()
    (package / "config.json").mkdir()
    assert "config.json is not a file" in _refusal(package)


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc/passwd", "sub/file", "..", ".", "", "a\\b", ".hidden", "a\0b", "a" * 300]
    + ["manifest.json"],
)
def test_path_in_the_manifest_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("{}")
    entry = {"sha256": hashlib.sha256(b"{}").hexdigest(), "size": 2}

    directory = write_package(tmp_path / "p", lambda m: m["files"].update({name: entry}))

    assert "is a path, not a file name" in _refusal(directory)


def test_file_that_is_not_listed_is_refused(package: Path) -> None:
    (package / "other.data").write_bytes(b"weights nobody checked")

    assert "'other.data', which the manifest does not list" in _refusal(package)


def test_newer_format_is_refused_whatever_else_it_holds(tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest.update(format_version=FORMAT_VERSION + 1, target="quantum")

    message = _refusal(write_package(tmp_path / "p", change))

    assert (
        f"format {FORMAT_VERSION + 1} is newer than {FORMAT_VERSION}" in message
        and "upgrade tokenweir" in message
    )


def test_every_wrong_field_of_the_manifest_is_named(tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        del manifest["format_version"]
        manifest["name"] = "../x"
        manifest["target"] = "abacus"
        manifest["typo"] = 1
        manifest["generation"]["vocab_size"] = "20"
        manifest["generation"]["cache"] = CACHE | {"max_len": 0}
        manifest["files"]["config.json"] = {"sha256": "short", "size": -1}
        manifest["certificate"]["judged"][0]["eager"]["p99"] = float("nan")

    message = _refusal(write_package(tmp_path / "p", change))

    for field in (
        "format_version",
        "name",
        "target",
        "typo",
        "generation.vocab_size",
        "generation.cache.max_len",
        "files.config.json.sha256",
        "files.config.json.size",
        "certificate.judged.0.eager.p99",
    ):
        assert f"{field}: " in message


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b"[" * 100_000])
def test_manifest_that_is_no_json_object_is_refused(package: Path, content: bytes) -> None:
    (package / "manifest.json").write_bytes(content)

    assert "manifest.json is not valid" in _refusal(package)


def test_field_that_stands_twice_in_the_manifest_is_refused(package: Path) -> None:
    text = (package / "manifest.json").read_text()
    (package / "manifest.json").write_text(text.replace('"files": {', '"files": {}, "files": {'))

    assert "an object has the key 'files' twice" in _refusal(package)


EDITS: list[Change] = [
    lambda m: m["certificate"].update(batch_invariant=False),
    lambda m: m["certificate"].update(cases=10**6),
    lambda m: m["certificate"]["covered"].update(steps=33),
    lambda m: m["toolchain"].update(torch="9.9"),
    lambda m: m.update(name="other"),
    lambda m: m.update(digest="0" * 64),
    lambda m: m.update(digest=None),
    lambda m: m.pop("digest"),
]


@pytest.mark.parametrize("edit", EDITS)
def test_manifest_that_was_edited_is_refused(package: Path, edit: Change) -> None:
    manifest = json.loads((package / "manifest.json").read_bytes())
    edit(manifest)
    (package / "manifest.json").write_text(json.dumps(manifest))

    assert "manifest.json was damaged or edited" in _refusal(package)
    with pytest.raises(PackageError, match="damaged or edited"):
        read_manifest(package)


def test_manifest_may_be_formatted_anew(package: Path) -> None:
    manifest = json.loads((package / "manifest.json").read_bytes())
    (package / "manifest.json").write_text(json.dumps(manifest, sort_keys=True))

    assert load_package(package).manifest.name == "dates"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"vocab_size": 2 * 10**12}, "generation.vocab_size"),
        ({"cache": CACHE | {"num_layers": 10**7}}, "generation.cache.num_layers"),
        ({"cache": CACHE | {"num_kv_heads": 2**40}}, "generation.cache.num_kv_heads"),
        ({"cache": CACHE | {"max_len": 2**40}}, "generation.cache.max_len"),
        ({"cross_cache": CACHE | {"head_dim": 2**40}}, "generation.cross_cache.head_dim"),
    ],
)
def test_size_that_no_model_has_is_refused(
    tmp_path: Path, change: dict[str, Any], field: str
) -> None:
    message = _refusal(write_package(tmp_path / "p", lambda m: m["generation"].update(change)))

    assert f"{field}: Input should be less than or equal to" in message and "got " in message


def test_row_of_the_cache_that_no_memory_holds_is_refused(tmp_path: Path) -> None:
    cache = {"num_layers": 2**10, "num_kv_heads": 2**10, "max_len": 2**20, "head_dim": 2**10}

    message = _refusal(write_package(tmp_path / "p", lambda m: m["generation"].update(cache=cache)))

    assert "generation.cache: a row of 9,007,199,254,740,992 bytes is more than" in message


def test_many_wrong_fields_are_named_in_a_short_line(tmp_path: Path) -> None:
    files = {f"{i}{'x' * 100}": 1 for i in range(5000)}

    message = _refusal(write_package(tmp_path / "p", lambda m: m.update(files=files)))

    assert len(message) < 10_000 and message.count("files.") == 32 and "4,968 more" in message


def test_huge_manifest_is_refused_unread(package: Path) -> None:
    with (package / "manifest.json").open("wb") as file:
        file.truncate(2**32)  # takes no room on disk

    assert "more than 1,048,576 bytes" in _refusal(package)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens_equal": 95}, "95 of 96 tokens were equal"),
        ({"tokens_equal": 97}, "97 of 96 tokens were equal"),
        ({"tokens_equal": 0, "tokens_compared": 0}, "no token was compared"),
        ({"cases": 0}, "certificate.cases"),
        ({"proof": "some"}, "certificate.proof"),
        ({"reference": "mine"}, "certificate.reference"),
        ({"judged": []}, "certificate: must have what was judged, and no loss in fp32"),
        ({"loss": LOSS.model_dump()}, "must have what was judged, and no loss in fp32"),
        ({"half": [judged().model_dump()]}, "certificate.half: must not be there for precision"),
        ({"answers": {"items": 1}}, "certificate.answers: must not be there for generate"),
    ],
)
def test_certificate_that_was_not_passed_is_refused(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    directory = write_package(tmp_path / "p", lambda m: m["certificate"].update(change))

    assert reason in _refusal(directory)


@pytest.mark.parametrize(
    ("play", "reason"),
    [
        (judged(2.4), None),
        (judged(2.6), "logits, alone: median 2.6e-06 is more than 2.5 times that of the eager"),
        (judged(exported=quantiles(p90=5.1e-6)), "p90 5.1e-06 is more than 2.5 times"),
        (judged(exported=quantiles(p90=5.1e-6), positions=99), None),
        (judged(exported=quantiles(p99=4.1e-5)), "p99 4.1e-05 is more than 10 times"),
        (judged(exported=quantiles(p99=4.1e-5), positions=999), None),
        (judged(exported=quantiles(largest=1.1e-4), positions=1), "largest 0.00011 is more than"),
        (judged(exported=quantiles(largest=9e-5), eager=quantiles(largest=1e-6)), None),
        (judged(90, floor=9e-4), None),
        (judged(what="alignment", play="beams", exported=quantiles(9)), "alignment, beams: median"),
    ],
)
def test_graphs_that_lose_more_than_they_may_beside_the_eager_model_are_refused(
    tmp_path: Path, play: Judged, reason: str | None
) -> None:
    plays = [judged().model_dump(), play.model_dump()]

    directory = write_package(tmp_path / "p", lambda m: m["certificate"].update(judged=plays))

    if reason is None:
        assert load_package(directory).manifest.certificate.judged[1] == play
    else:
        assert f"certificate.judged: {play.what}" in _refusal(directory)
        assert reason in _refusal(directory)


def test_a_model_that_decides_no_token_can_be_loaded(tmp_path: Path) -> None:
    """All its weights are zero, for one: it is as right as any."""
    found = {"tokens_equal": 0, "tokens_compared": 0, "covered": {"undecided_tokens": 96}}
    directory = write_package(tmp_path / "p", lambda m: m["certificate"].update(found))

    assert load_package(directory).manifest.certificate.tokens_compared == 0


def _loss(**changes: float) -> Loss:
    return LOSS.model_copy(update={"max_token_loss": 0.1, **changes})


@pytest.mark.parametrize(
    ("weights", "changes", "reason"),
    [
        ("int8", {"loss": _loss(), "tokens_equal": 90}, None),
        ("fp32", {"loss": _loss(), "judged": ()}, "what was judged, and no loss in fp32"),
        ("int8", {"loss": None, "judged": (judged(),)}, "a loss, and nothing judged in int8"),
        ("int8", {"judged": (judged(),)}, "a loss, and nothing judged in int8"),
        ("int8", {"loss": _loss(), "tokens_equal": 80}, "80 of 96 tokens were equal"),
        ("int8", {"loss": _loss(max_abs_logit_diff=1.1)}, "differ by 1.1 from the eager model"),
    ],
)
def test_certificate_of_a_format_with_loss_is_held_to_its_limits(
    tmp_path: Path, weights: Weights, changes: dict[str, Any], reason: str | None
) -> None:
    found = certificate(PackageFormat(weights=weights), **changes).model_dump(mode="json")

    directory = write_package(
        tmp_path / "p", lambda m: m.update(weights=weights, certificate=found)
    )

    if reason is None:
        assert load_package(directory).manifest.weights == weights
    else:
        assert reason in _refusal(directory)


TEXT = {"vocab_size": 20, "max_len": 8, "pad_token_id": 0, "embedding_dim": 4}
IMAGE = {"size": 4, "channels": 3, "mean": [0.5] * 3, "std": [0.5] * 3, "embedding_dim": 4}
ONE_PASS = {"task": "classify", "layout": None, "generation": None, "labels": ["a"]}
FAR_VECTORS = certificate(
    PackageFormat(weights="int8"),
    "embed",
    answers=Answers(items=1, max_vector_loss=0.3),
    loss=_loss(max_vector_loss=0.2),
)


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"generation": None}, ["generation"]),
        ({"encoding": TEXT, "image": IMAGE}, ["encoding", "image"]),
        ({"task": "label", "layout": None}, ["task", "layout"]),
        ({"architecture": "decoder"}, ["generation.cross_cache", "generation.decoder_start_token"]),
        ({"architecture": "encoder"}, ["generation", "encoding", "task", "layout", "labels"]),
        (
            ONE_PASS | {"architecture": "encoder", "encoding": TEXT},
            ["files: model.onnx", "certificate.answers: must be there for classify"],
        ),
        (
            ONE_PASS
            | {"architecture": "encoder", "encoding": TEXT, "task": "embed", "labels": []}
            | {"weights": "int8", "certificate": FAR_VECTORS.model_dump(mode="json")},
            ["1 less the cosine of a vector to the eager model's is 0.3, more than 0.2"],
        ),
        (
            ONE_PASS | {"architecture": "encoder", "encoding": TEXT, "task": "embed"},
            ["labels: 1 of them do not go with embed"],
        ),
        (
            ONE_PASS
            | {"architecture": "encoder", "encoding": TEXT | {"embedding_dim": None}}
            | {"task": "embed", "labels": []},
            ["encoding.embedding_dim: none; embed needs the width"],
        ),
        (
            ONE_PASS | {"architecture": "encoder", "encoding": TEXT | {"pad_token_id": 20}},
            ["encoding.pad_token_id: 20 is outside the vocabulary, 0 to 19"],
        ),
        (
            ONE_PASS
            | {"architecture": "vision-encoder", "image": IMAGE | {"mean": [0], "std": [0, 1, 1]}},
            ["image.mean: 1 values for 3 channels", "image.std"],
        ),
        ({"files": {}}, ["encoder.onnx", "decoder.onnx", "tokenizer.json"]),
        (
            {"generation": GENERATION | {"num_heads": 3}},
            ["num_heads: 3 is not a multiple of cache.num_kv_heads, 2"],
        ),
        (
            {
                "architecture": "decoder",
                "generation": GENERATION | {"alignment": True, "source_vocab_size": 30},
            },
            ["alignment: must not be there", "generation.source_vocab_size: must not be there"],
        ),
        (
            {"generation": GENERATION | {"decoder_start_token_id": 20, "eos_token_ids": [2, 99]}},
            ["generation.decoder_start_token_id: 20", "generation.eos_token_ids.1: 99"],
        ),
        (
            {"defaults": {"beams": 4, "beam": True, "temperature": "1.5"}},  # text is no number
            ["defaults.beams: ", "defaults.beam: ", "defaults.temperature: "],
        ),
    ],
)
def test_manifest_that_contradicts_itself_is_refused(
    tmp_path: Path, change: dict[str, Any], fields: list[str]
) -> None:
    message = _refusal(write_package(tmp_path / "p", lambda m: m.update(change)))

    for field in fields:
        assert field in message


def test_sources_have_the_vocabulary_of_targets_unless_they_have_their_own(tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["generation"].update(source_vocab_size=30)

    plain = load_package(write_package(tmp_path / "p")).manifest.generation
    own = load_package(write_package(tmp_path / "q", change)).manifest.generation

    assert plain is not None and own is not None
    assert (plain.source_vocab_size, plain.prompt_vocab_size) == (None, 20)
    assert (own.vocab_size, own.prompt_vocab_size) == (20, 30)


def test_defaults_are_read_and_an_older_package_has_none(tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["defaults"] = {"beam": 4, "length_penalty": -1.0, "forced_begin": [3]}

    plain = load_package(write_package(tmp_path / "p")).manifest.defaults
    own = load_package(write_package(tmp_path / "q", change)).manifest.defaults

    assert plain.given == {}
    assert own.given == {"beam": 4, "length_penalty": -1.0, "forced_begin": (3,)}


def test_defaults_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    given = {"banned_sequences": [[1, 2], [3, 20]], "forced_end": 19}

    found = _refusal(write_package(tmp_path / "p", lambda m: m.update(defaults=given)))

    assert "defaults.banned_sequences: 20 is outside the vocabulary, 0 to 19" in found
    assert "forced_end" not in found


@pytest.mark.parametrize("kind", ["parent", "absolute", "link"])
def test_graph_whose_weights_lie_outside_the_directory_is_not_loaded(
    tmp_path: Path, kind: str
) -> None:
    secret = tmp_path / "secret.data"
    secret.write_bytes(np.arange(4, dtype=np.float32).tobytes())
    directory = tmp_path / "package"
    directory.mkdir()
    (directory / "link.data").symlink_to(secret)
    location = {"parent": "../secret.data", "absolute": str(secret), "link": "link.data"}[kind]
    weights = numpy_helper.from_array(np.zeros(4, dtype=np.float32), "w")
    weights.ClearField("raw_data")
    weights.data_location = TensorProto.EXTERNAL
    weights.external_data.add(key="location", value=location)
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])],
        [weights],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    (directory / "model.onnx").write_bytes(model.SerializeToString())

    with pytest.raises(PackageError, match="cannot load this graph"):
        create_session(directory / "model.onnx")
    assert onnx.load(str(directory / "model.onnx"), load_external_data=False)


def test_large_file_that_was_hardly_written_is_not_hashed(tmp_path: Path) -> None:
    size = 40 * 2**30

    def grow(manifest: dict[str, Any]) -> None:
        manifest["files"]["decoder.onnx"]["size"] = size

    package = write_package(tmp_path / "package", grow)
    os.truncate(package / "decoder.onnx", size)

    assert "has 42,949,672,960 bytes, of which only" in _refusal(package)


def test_number_of_a_format_is_cut_short(package: Path) -> None:
    (package / "manifest.json").write_text(f'{{"format_version": {"9" * 4000}}}')

    assert len(_refusal(package)) < 600


@pytest.mark.parametrize("covered", [-1, 2**63, [-1], [10**100]])
def test_number_that_nothing_counts_is_refused(tmp_path: Path, covered: object) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["certificate"]["covered"] = {"steps": covered}

    assert "certificate.covered.steps" in _refusal(write_package(tmp_path / "package", change))
