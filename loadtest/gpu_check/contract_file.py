"""The contract beside graphs that have no package: what a runner must know of them."""

from __future__ import annotations

from pathlib import Path

from engine.package.manifest import GenerationContract

_NAME = "contract.json"


def write_contract(contract: GenerationContract, directory: Path) -> None:
    """Write the contract of the graphs in a directory."""
    (directory / _NAME).write_text(contract.model_dump_json())


def read_contract(directory: Path) -> GenerationContract:
    """Read what `write_contract` wrote."""
    return GenerationContract.model_validate_json((directory / _NAME).read_text())
