"""A package is what its manifest says of it, and the last line says so, or it is refused."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.errors import CertificateError, PackageError
from engine.package.manifest import Certificate
from engine.package.package import load_package
from exporter import verification
from exporter.checkpoint import load_checkpoint, save_checkpoint
from exporter.export import export_package
from exporter.graphs import package_graphs
from exporter.graphs.package_graphs import write_graphs
from exporter.graphs.torch_export import Graphs
from exporter.progress import Progress
from exporter.prover.arithmetic import reordered
from exporter.prover.eager import Eager, EagerModel, Forward
from exporter.prover.loss import LossLimits
from exporter.toolchain import read_toolchain
from exporter.verification import verify_package
from server.cli.app import run
from tests.exporter.prover import test_faults_of_choices as choices
from tests.exporter.prover.surgery import Mutation, spoiled
from tests.fakes.stand_in_certificate import edit_manifest, judged

# The distribution that is installed here: for a CPU, or for CUDA.
(RUNTIME,) = {"onnxruntime", "onnxruntime-gpu"} & set(read_toolchain())
TinyGraphs = Callable[[str], tuple[Path, Graphs]]
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def exported(
    tiny_graphs: TinyGraphs, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """The tiny GPT: its checkpoint, its package."""
    checkpoint, graphs = tiny_graphs("gpt")
    package = tmp_path_factory.mktemp("verified") / "package"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(package_graphs, "build_graphs", lambda model, **_: graphs)
        export_package(checkpoint, package)
    return checkpoint, package


@pytest.fixture
def package(exported: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(exported[1], tmp_path / "package"))


@pytest.fixture
def checkpoint(exported: tuple[Path, Path]) -> Path:
    return exported[0]


@pytest.fixture
def compared(exported: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the comparison as done: it finds what it found when the package was exported."""
    found = load_package(exported[1]).manifest.certificate
    monkeypatch.setattr(verification, "prove", lambda *_, **__: found)


def test_verify_repeats_the_certificate_and_says_so(package: Path, checkpoint: Path) -> None:
    verified = verify_package(package, checkpoint)

    assert verified.certificate == load_package(package).manifest.certificate
    assert verified.summary() == (
        f"package: package 1 matches {checkpoint}: 4 files intact, "
        f"{verified.certificate.cases} cases compared, certificate reproduced; "
        "made with the same toolchain"
    )


def test_the_command_tells_how_far_it_is_and_ends_with_one_line_of_what_was_found(
    package: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stored, told = load_package(package).manifest.certificate, list[Any]()

    def compared(*_: object, progress: Progress, **__: object) -> Certificate:
        progress(3, 8)
        return stored

    @contextmanager
    def noted(title: str) -> Iterator[Progress]:
        told.append(title)
        yield lambda *counts: told.append(counts)

    monkeypatch.setattr(verification, "prove", compared)
    monkeypatch.setattr("server.cli.models.packages.show_progress", noted)

    assert run(["verify", str(package), str(checkpoint)]) == 0

    found = verify_package(package, checkpoint)
    assert capsys.readouterr().out.splitlines()[-1] == found.summary()
    assert told == ["Comparing with PyTorch", (3, 8)]


@pytest.mark.usefixtures("compared")
def test_the_command_fails_with_one_line_where_the_certificate_was_edited(
    package: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit_manifest(package, lambda m: m["certificate"].update(batch_invariant=False))

    assert run(["verify", str(package), str(checkpoint)]) == 1

    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: ") and "batch_invariant is False, found True" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_invariant": False}, "batch_invariant is False, found True"),
        ({"cases": 10**6}, "cases is 1000000, found "),
        ({"judged": [judged(1e-6).model_dump()]}, "alone, logits.exported.median is 1e-12, found"),
        ({"reference": "mean of runs"}, "reference is mean of runs, found float64"),
        ({"dtype": "float64"}, "dtype is float64, found fp32"),
        ({"covered": {"steps": 10**6}}, "covered.steps is 1000000, found "),
        ({"tokens_compared": 10**6, "tokens_equal": 10**6}, "tokens_equal is 1000000, found "),
    ],
)
@pytest.mark.usefixtures("compared")
def test_certificate_that_is_not_found_is_refused(
    package: Path, checkpoint: Path, change: dict[str, Any], message: str
) -> None:
    edit_manifest(package, lambda m: m["certificate"].update(change))

    with pytest.raises(CertificateError, match="its certificate is not what is found") as caught:
        verify_package(package, checkpoint)

    assert message in str(caught.value)


@pytest.mark.usefixtures("compared")
def test_certificate_that_is_not_found_is_refused_where_the_release_is_not_installed(
    package: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = {name: what for name, what in read_toolchain().items() if name != "tokenweir"}
    monkeypatch.setattr(verification, "read_toolchain", lambda: here)
    edit_manifest(package, lambda m: m["certificate"].update(cases=1))

    with pytest.raises(CertificateError, match=r"it was edited, or .* \(here none\)"):
        verify_package(package, checkpoint)


@pytest.mark.usefixtures("compared")
@pytest.mark.parametrize(
    ("times", "message"),
    [
        ({"median": 1.9, "p90": 1.9, "p99": 30, "largest": 50}, None),
        ({"median": 0.6, "p90": 0.6, "p99": 0.01, "largest": 0.01}, None),
        (
            {"median": 3},
            r"alone, logits\.exported\.median is .*, found .*it was edited, or",
        ),
        ({"median": 0.3}, r"alone, logits\.eager\.median is"),
        ({"p90": 3}, r"alone, log-probabilities\.eager\.p90 is"),
    ],
)
def test_of_the_quantiles_median_and_90th_percentile_are_found_again_but_no_tail(
    times: dict[str, float], message: str | None, package: Path, checkpoint: Path
) -> None:
    """A machine that sums in another order loses somewhat more or less, and by chance behind."""

    def change(manifest: dict[str, Any]) -> None:
        for one in manifest["certificate"]["judged"]:
            one["runs"] = 5 - one["runs"]
            for side in (one["exported"], one["eager"]):
                side |= {name: side[name] * factor for name, factor in times.items()}

    edit_manifest(package, change)

    if message is None:
        assert "certificate reproduced" in verify_package(package, checkpoint).summary()
    else:
        with pytest.raises(CertificateError, match=message):
            verify_package(package, checkpoint)


def test_a_certificate_that_was_made_with_another_order_of_sums_is_found_again(
    tiny_graphs: TinyGraphs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    checkpoint, graphs = tiny_graphs("gpt")
    monkeypatch.setattr(package_graphs, "build_graphs", lambda model, **_: graphs)
    run = EagerModel.run

    def in_another_order(
        model: EagerModel, forward: Forward, *, in_own: bool = True
    ) -> list[Eager]:
        with reordered(99):
            others = forward(model.own)
        pairs = zip(run(model, forward, in_own=in_own), others, strict=True)
        return [replace(one, runs=[other]) for one, other in pairs]

    with monkeypatch.context() as patch:
        patch.setattr(EagerModel, "run", in_another_order)
        made = export_package(checkpoint, tmp_path / "package", proof="quick").certificate

    found = verify_package(tmp_path / "package", checkpoint).certificate
    assert found.judged[0].eager != made.judged[0].eager
    assert found.judged[0].exported == made.judged[0].exported


def test_a_package_is_verified_at_the_level_at_which_it_was_proven(
    tiny_graphs: TinyGraphs,
    package: Path,
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    graphs = tiny_graphs("gpt")[1]
    monkeypatch.setattr(package_graphs, "build_graphs", lambda model, **_: graphs)
    quick = export_package(checkpoint, tmp_path / "quick", proof="quick").certificate

    again = verify_package(tmp_path / "quick", checkpoint).certificate

    assert quick.proof == again.proof == "quick"
    assert again.cases == quick.cases < load_package(package).manifest.certificate.cases
    edit_manifest(tmp_path / "quick", lambda m: m["certificate"].update(proof="standard"))
    with pytest.raises(CertificateError, match=f"cases is {quick.cases}, found "):
        verify_package(tmp_path / "quick", checkpoint)


@pytest.mark.usefixtures("compared")
def test_another_toolchain_is_named_as_a_claim(package: Path, checkpoint: Path) -> None:
    claimed = {RUNTIME: "1.30", "threads": "64", "extra": "1"}
    edit_manifest(package, lambda m: m["toolchain"].update(claimed))

    line = verify_package(package, checkpoint).summary()

    assert f"; claimed, not verified: made with {RUNTIME} 1.30 (here " in line
    assert "threads 64 (here " in line and "extra 1 (here none)" in line


@pytest.mark.parametrize(
    ("name", "version"),
    [(RUNTIME, "9.9"), (RUNTIME, "x"), ("tokenweir", "99.1"), ("opset", "999")],
)
def test_toolchain_that_cannot_be_shown_here_is_refused(
    name: str, version: str, package: Path, checkpoint: Path
) -> None:
    edit_manifest(package, lambda m: m["toolchain"].update({name: version}))

    with pytest.raises(CertificateError, match=f"its toolchain has {name} {version}, which .* of "):
        verify_package(package, checkpoint)


@pytest.mark.usefixtures("compared")
def test_other_counts_are_refused_whatever_release_the_toolchain_has(
    package: Path, checkpoint: Path
) -> None:
    def change(manifest: dict[str, Any]) -> None:
        manifest["toolchain"]["tokenweir"] = "0.0.1"
        manifest["certificate"]["cases"] = 10**6

    edit_manifest(package, change)

    with pytest.raises(CertificateError, match="cases is 1000000, found ") as caught:
        verify_package(package, checkpoint)
    assert "with this release, or verify it with that one" in str(caught.value)


@pytest.mark.usefixtures("compared")
def test_name_and_version_are_told_for_nothing_else_shows_them(
    package: Path, checkpoint: Path
) -> None:
    edit_manifest(package, lambda m: m.update(name="other", version="7"))

    line = verify_package(package, checkpoint).summary()

    assert line.startswith("package: other 7 matches ")
    assert "; not verified: the name other, the version 7, which a person chose; " in line


@pytest.mark.usefixtures("few_cases")
def test_limits_of_a_loss_are_told_where_a_person_chose_them(
    checkpoint: Path, tmp_path: Path
) -> None:
    limits = LossLimits(1, 100, 0.05, 0.5)
    export_package(checkpoint, tmp_path / "package", kv_cache="int8", limits=limits)

    line = verify_package(tmp_path / "package", checkpoint).summary()

    chosen = "max_token_loss 1, max_logit_loss 100, max_vector_loss 0.5"
    assert f"; not verified: {chosen}, which a person chose; " in line


@pytest.mark.parametrize("name", ["target_tokenizer.json", "chat.json", "encoder.onnx"])
def test_a_file_that_the_checkpoint_does_not_export_to_is_refused(
    name: str, package: Path, checkpoint: Path
) -> None:
    """With a tokenizer of what is written, for one, the engine writes other texts."""
    data = (package / "tokenizer.json").read_bytes()
    (package / name).write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_manifest(package, lambda m: m["files"].update({name: entry}))
    load_package(package)  # nothing of it is wrong by itself

    with pytest.raises(CertificateError, match=f"{name} is not of .*, which exports to no such"):
        verify_package(package, checkpoint)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda m: m["generation"].update(eos_token_ids=[1]), "generation"),
        (lambda m: m["generation"].update(num_heads=4), "generation"),
        (lambda m: m.update(labels=["one"]), "labels"),
        (lambda m: m.update(defaults={"forced_begin": [1]}), "defaults"),
    ],
)
@pytest.mark.usefixtures("compared")
def test_contract_that_is_not_the_checkpoints_is_refused(
    package: Path, checkpoint: Path, change: Change, field: str
) -> None:
    edit_manifest(package, change)

    with pytest.raises(CertificateError, match=f"{field} is .*, the checkpoint's is "):
        verify_package(package, checkpoint)


def test_package_that_is_swapped_while_it_is_compared_is_refused(
    package: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = load_package(package).manifest.certificate

    def prove(*_: object, **__: object) -> Certificate:
        shutil.copy(package / "decoder.onnx", package / "copy")
        (package / "copy").rename(package / "decoder.onnx")
        return found

    monkeypatch.setattr(verification, "prove", prove)

    with pytest.raises(PackageError, match="was changed while the package was loaded"):
        verify_package(package, checkpoint)


def test_verify_refuses_other_weights(package: Path, checkpoint: Path, tmp_path: Path) -> None:
    changed = load_checkpoint(checkpoint)
    changed.model.get_parameter("decoder.layers.1.feed_forward.up_proj.bias").data[3] += 0.1
    shutil.copytree(checkpoint, tmp_path / "other")
    save_checkpoint(tmp_path / "other", "tiny", changed.model, changed.tokenizer)

    with pytest.raises(CertificateError, match="logits are .* from float64"):
        verify_package(package, tmp_path / "other")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_verify_refuses_another_config_or_tokenizer(
    name: str, package: Path, checkpoint: Path, tmp_path: Path
) -> None:
    shutil.copytree(checkpoint, tmp_path / "other")
    text = (checkpoint / name).read_text()
    (tmp_path / "other" / name).write_text(text.replace("w3", "x3").replace("tiny", "tinier"))

    with pytest.raises(CertificateError, match=name):
        verify_package(package, tmp_path / "other")


def _put(graphs: Graphs, package: Path) -> None:
    """Put other graphs into a package as somebody does who knows of its hashes."""
    write_graphs(graphs, package)

    def rehash(manifest: dict[str, Any]) -> None:
        for name, entry in manifest["files"].items():
            data = (package / name).read_bytes()
            entry.update(size=len(data), sha256=hashlib.sha256(data).hexdigest())

    edit_manifest(package, rehash)


@pytest.mark.parametrize(
    "fault",
    [
        choices.top_of_the_smallest,
        choices.top_ids_off_by_one,
        choices.log_softmax_left_out,
        choices.logit_idx_collapsed,
    ],
)
def test_verify_refuses_a_faulty_graph_whose_hashes_are_right(
    fault: Mutation, package: Path, checkpoint: Path, tiny_graphs: TinyGraphs
) -> None:
    _, graphs = tiny_graphs("gpt")
    _put(spoiled(graphs, "decoder.onnx", fault), package)
    load_package(package)  # nothing of it is wrong by itself

    with pytest.raises(CertificateError, match="prompt of "):
        verify_package(package, checkpoint)


def test_verify_refuses_a_flipped_bit(package: Path, checkpoint: Path) -> None:
    data = package / "decoder.onnx.data"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)

    with pytest.raises(PackageError, match="damaged"):
        verify_package(package, checkpoint)
