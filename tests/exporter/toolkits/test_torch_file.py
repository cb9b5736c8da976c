"""Files of `torch.save` are read without running anything of them."""

from __future__ import annotations

import builtins
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import CheckpointError
from exporter.toolkits.torch_file import Record, plain, read_torch_file
from tests.exporter.toolkits.sources import save_opennmt


class Calls:
    """Is saved as the call of a function, which whoever unpickles it makes."""

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, ...]]:
        return self._call


@pytest.mark.parametrize("is_archive", [True, False])
def test_options_are_records_of_what_they_were(is_archive: bool, tmp_path: Path) -> None:
    options = Namespace(layers=2, path=Path("x"), inner=Namespace(dropout=[0.1, 0.2]))
    save({"opt": options, "model": {"w": torch.ones(2)}}, tmp_path / "a.pt", is_archive=is_archive)

    content = read_torch_file(tmp_path / "a.pt")

    assert isinstance(content["opt"], Record)
    found = plain(content["opt"])
    assert found == {"layers": 2, "path": "x", "inner": {"dropout": [0.1, 0.2]}}
    assert torch.equal(content["model"]["w"], torch.ones(2))


def test_vocabularies_of_torchtext_are_records(tmp_path: Path) -> None:
    source = save_opennmt(tmp_path / "a.pt", version=2)

    vocab = read_torch_file(source.path)["vocab"]

    field = vocab["src"].fields["fields"][0][1]
    assert field.fields["vocab"].fields["itos"][:5] == [
        "<unk>",
        "<blank>",
        "<s>",
        "</s>",
        "quelle0",
    ]


def test_options_of_omegaconf_become_plain_data() -> None:
    def node(**fields: object) -> Record:
        record = Record()
        record.__setstate__(fields)
        return record

    values = {
        "layers": node(_val=6),
        "refers": node(_val="${model.x}"),
        "unset": node(_val="???"),
        "arch": Record("wmt"),
    }
    config = node(_content=values, _metadata=node(), _parent=None)

    assert plain({"cfg": config}) == {
        "cfg": {"layers": 6, "refers": None, "unset": None, "arch": "wmt"}
    }


@pytest.mark.parametrize("is_archive", [True, False])
@pytest.mark.parametrize("function", [builtins.eval, builtins.getattr, builtins.__import__])
def test_functions_that_no_toolkit_saves_are_refused_by_name(
    function: Callable[..., Any], is_archive: bool, tmp_path: Path
) -> None:
    save({"opt": Calls(function, "1")}, tmp_path / "a.pt", is_archive=is_archive)

    with pytest.raises(
        CheckpointError, match=rf"names (builtins|__builtin__)\.{function.__name__}"
    ):
        read_torch_file(tmp_path / "a.pt")


def test_a_function_of_a_known_package_is_not_called(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.touch()
    save({"opt": Calls(Path.unlink, victim), "model": {}}, tmp_path / "a.pt", is_archive=True)
    save({"opt": Calls(torch.save, 1, str(tmp_path / "b")), "n": 1}, tmp_path / "c.pt")

    with pytest.raises(CheckpointError, match=r"names builtins\.getattr"):  # the class of unlink
        read_torch_file(tmp_path / "a.pt")
    content = read_torch_file(tmp_path / "c.pt")

    assert victim.exists()
    assert not (tmp_path / "b").exists()
    assert content["opt"].arguments == (1, str(tmp_path / "b"))


def save(content: object, path: Path, *, is_archive: bool = True) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=is_archive)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    save({"model": {"w": torch.ones(2000)}}, tmp_path / "a.pt")
    content = (tmp_path / "a.pt").read_bytes()

    for size in (0, 10, len(content) // 2, len(content) - 30):
        (tmp_path / "a.pt").write_bytes(content[:size])
        with pytest.raises(CheckpointError, match="or damaged"):
            read_torch_file(tmp_path / "a.pt")
