"""A target is data: its name stands in its declaration, nothing below the option asks for it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import exporter
from engine.package.manifest import Target

HOME = Path(exporter.__file__).parent
DECLARATION = HOME / "graphs" / "target.py"
NAMES = re.compile(rf"\b({'|'.join(get_args(Target))})\b")
DEVICES = ("device", "map_location")  # arguments that say where something runs


def _strings(path: Path) -> Iterator[ast.Constant]:
    """Yield the texts of a file that are neither docstring nor device."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    left_out = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    left_out |= {id(n.value) for n in nodes if isinstance(n, ast.keyword) and n.arg in DEVICES}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in left_out:
                yield node


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            yield from (alias.name for alias in node.names)


def test_no_target_is_named_outside_its_declaration() -> None:
    found = [
        f"{path.relative_to(HOME)}:{text.lineno}: {text.value}"
        for path in HOME.rglob("*.py")
        if path != DECLARATION
        for text in _strings(path)
        if NAMES.search(text.value)
    ]
    found += [
        f"{path.relative_to(HOME)} imports {name}"
        for path in HOME.rglob("*.py")
        for name in _imported(path)
        if name in {target.upper() for target in get_args(Target)}
    ]

    assert not found
