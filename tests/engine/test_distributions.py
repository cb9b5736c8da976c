"""Which onnxruntime is installed: what is refused before it is imported."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine.distributions import check_cuda_distribution, check_distributions
from engine.errors import ConfigError

ROOT = Path(__file__).parents[2]


def install(place: Path, *names: str) -> None:
    for name in names:
        info = place / f"{name.replace('-', '_')}-9.1.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.1\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the one place where anything is installed."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return tmp_path


def test_both_distributions_in_one_place_are_refused_with_the_lines_to_type(site: Path) -> None:
    install(site, "onnxruntime", "onnxruntime-gpu")

    with pytest.raises(ConfigError) as caught:
        check_distributions()

    first, *lines = str(caught.value).splitlines()
    assert f"onnxruntime 9.1 and onnxruntime-gpu 9.1 are both installed in {site}" in first
    assert lines == [
        "pip uninstall --yes onnxruntime onnxruntime-gpu",
        "pip install 'tokenweir[gpu]'",
    ]


@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime-gpu"])
def test_one_distribution_is_taken(site: Path, name: str) -> None:
    install(site, name)

    check_distributions()


def test_distributions_in_two_places_have_overwritten_nothing(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site / "one", "onnxruntime")
    install(site / "other", "onnxruntime-gpu")
    monkeypatch.setattr(sys, "path", [str(site / "other"), str(site / "one")])

    check_distributions()
    check_cuda_distribution()


def test_cuda_without_its_distribution_is_refused_and_names_the_extra(site: Path) -> None:
    install(site, "onnxruntime")

    with pytest.raises(ConfigError, match=r"onnxruntime-gpu is not installed") as caught:
        check_cuda_distribution()

    said, *lines = str(caught.value).splitlines()
    assert re.search("without a GPU, .* --device cpu, .*; with one, type these two lines:$", said)
    assert lines == ["pip uninstall --yes onnxruntime", "pip install 'tokenweir[gpu]'"]


def test_cuda_with_both_is_refused_for_that(site: Path) -> None:
    install(site, "onnxruntime", "onnxruntime-gpu")

    with pytest.raises(ConfigError, match="both installed"):
        check_cuda_distribution()


def test_both_are_refused_before_any_of_it_is_imported(tmp_path: Path) -> None:
    install(tmp_path, "onnxruntime", "onnxruntime-gpu")
    script = (
        "import sys\n"
        "from engine.errors import ConfigError\n"
        "try:\n"
        "    import engine.session\n"
        "except ConfigError as error:\n"
        "    print('onnxruntime' in sys.modules, 'both installed' in str(error))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])},
        capture_output=True,
        text=True,
    )

    assert done.stdout == "False True\n", done.stderr
