"""What goes in and out of graphs is named in one file, which whoever binds them asks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import engine
from engine.package import graph_io
from engine.package.manifest import CacheShape, GenerationContract


def literals(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_the_engine_types_no_input_of_a_graph_but_where_they_are_described() -> None:
    cache = CacheShape(num_layers=1, num_kv_heads=1, max_len=8, head_dim=2)
    contract = GenerationContract(
        vocab_size=5,
        num_heads=1,
        cache=cache,
        cross_cache=cache,
        decoder_start_token_id=0,
        eos_token_ids=(1,),
        alignment=True,
    )
    shapes = (graph_io.decoder_shape(contract), graph_io.encoder_shape(cache))
    names = {name for shape in shapes for name in shape.inputs}
    described = Path(graph_io.__file__)

    found = [
        f"{path.name}: {text}"
        for path in Path(engine.__path__[0]).rglob("*.py")
        if path != described
        for text in literals(path)
        if text in names
    ]

    assert found == []
    assert {"input_ids", "beam_rows", "alignment_idx"} <= names & set(literals(described))
