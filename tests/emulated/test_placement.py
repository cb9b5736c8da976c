"""Graphs for CUDA, on the emulated device: every node runs there, and a call can be captured."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from engine.package.manifest import CacheDtype, PackageFormat, Precision
from exporter.checkpoint import load_checkpoint, save_checkpoint
from exporter.graphs.package_graphs import build_package_graphs, write_graphs
from exporter.graphs.target import CUDA
from exporter.graphs.torch_export import build_graphs
from exporter.models import TransformerConfig, build_model
from exporter.tasks import TASKS, build_task
from tests.emulated.conftest import Export, RunScript
from tests.emulated.models import FIRST, MODELS
from tests.parity.conftest import word_tokenizer

pytestmark = [pytest.mark.emulated, pytest.mark.timeout(600)]

# Launches of a decode step of 12 layers in half precision, with the vocabulary of the real model:
# as many as it has, so that one more is seen.
MOST_LAUNCHES = {("gpt2", 50_257): 131, ("llama", 128_256): 153}

LAUNCHES_OF_DRAWS = (24, 69, 409)

# Launches for 8 texts or pictures, with two layers in half precision: likewise.
MOST_LAUNCHES_OF_READERS = {
    "dates": 42,
    "marian": 45,
    "t5": 56,
    "sentiment": 36,
    "sentences": 46,
    "sentences-max": 37,
    "modernbert": 88,
    "tagging": 40,
    "digits": 30,
}

OTHERS = tuple(name for name in MODELS if name not in FIRST)


@pytest.mark.parametrize(
    ("names", "precision"),
    [
        (FIRST, "fp16"),
        # Products that are divided into unequal parts.
        pytest.param(["llama"], "fp32", marks=pytest.mark.long),
        pytest.param(OTHERS, "fp16", marks=pytest.mark.long),
        pytest.param(MODELS, "fp32", marks=pytest.mark.long),
        pytest.param(MODELS, "bf16", marks=pytest.mark.long),
    ],
    ids=["first-fp16", "llama-fp32", "others-fp16", "all-fp32", "all-bf16"],
)
def test_every_node_is_on_the_device_and_every_graph_runs_and_can_be_captured(
    names: Iterable[str], precision: str, export: Export, on_device: RunScript
) -> None:
    assert_on_device([path for name in names for path in export(name, precision)], on_device)


@pytest.mark.long
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("name", TASKS)
def test_the_models_of_the_demo_are_on_the_device_at_their_size(
    name: str, precision: Precision, on_device: RunScript, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(" ".join(f"{i}-{j}" for j in range(100)) for i in range(80)))
    task = build_task(name, files=[text] if name == "text" else [])
    model = build_model(task.config).eval()
    graphs = build_graphs(model, target=CUDA, precision=precision)
    write_graphs(graphs, tmp_path)

    assert_on_device([str(tmp_path / file) for file in graphs], on_device)


def assert_on_device(paths: list[str], on_device: RunScript) -> None:
    """Assert that all of the graphs runs there, is captured and is launched again."""
    found = on_device("look_at_graph.py", *paths)

    assert {path: seen["refused"] for path, seen in found.items()} == dict.fromkeys(paths)
    for path, seen in found.items():
        captured, again = seen["captured"]
        assert captured["hostcopies"] == 0, path
        assert again == {"launches": 0, "graphs": 1, "syncs": 0, "hostcopies": 0}, path


def test_draws_are_computed_on_the_device_in_few_launches(
    draw_paths: Callable[[int], list[str]], on_device: RunScript
) -> None:
    paths = draw_paths(50_257)
    assert_on_device(paths, on_device)

    found = on_device("look_at_graph.py", *paths)

    assert tuple(found[path]["launches"] for path in paths) == LAUNCHES_OF_DRAWS


@pytest.mark.parametrize(
    ("name", "vocab_size"),
    [("gpt2", 50_257), pytest.param("llama", 128_256, marks=pytest.mark.long)],
)
def test_a_decode_step_has_few_launches(
    name: str, vocab_size: int, export: Export, on_device: RunScript
) -> None:
    """The nine layers behind a third have as many as it: what has twelve is traced for long."""
    paths = [
        path
        for layers in (2, 3)
        for path in export(name, "fp16", num_decoder_layers=layers, vocab_size=vocab_size)
    ]

    found = on_device("look_at_graph.py", *paths)

    of_two, of_three = (found[path]["launches"] for path in paths)
    assert of_three - of_two > 0
    assert of_three + 9 * (of_three - of_two) <= MOST_LAUNCHES[name, vocab_size]


@pytest.mark.parametrize(
    "names",
    [
        [name for name in MOST_LAUNCHES_OF_READERS if name in FIRST],
        pytest.param([*MOST_LAUNCHES_OF_READERS], marks=pytest.mark.long),
    ],
    ids=["first", "all"],
)
def test_what_reads_has_few_launches(
    names: list[str], export: Export, on_device: RunScript
) -> None:
    paths = {name: export(name, "fp16")[0] for name in names}

    found = on_device("look_at_graph.py", *paths.values())

    launches = {name: found[path]["launches"] for name, path in paths.items()}
    more = {name: n for name, n in launches.items() if n > MOST_LAUNCHES_OF_READERS[name]}
    assert not more


@pytest.mark.long
@pytest.mark.parametrize(("name", "vocab_size"), MOST_LAUNCHES)
def test_a_decode_step_of_twelve_layers_has_few_launches(
    name: str, vocab_size: int, export: Export, on_device: RunScript
) -> None:
    (path,) = export(name, "fp16", num_decoder_layers=12, vocab_size=vocab_size)

    found = on_device("look_at_graph.py", path)

    assert found[path]["launches"] <= MOST_LAUNCHES[name, vocab_size]


@pytest.mark.long
def test_an_int8_cache_is_read_as_it_is_where_four_query_heads_share_a_key_head(
    on_device: RunScript, tmp_path: Path
) -> None:
    """It is made float16 before if there are six, or a bound: such packages are refused."""
    kinds = {"four": {}, "six": {"num_heads": 12}, "bound": {"attention.softcap": 50.0}}
    paths = {
        (kind, cache): write_with_cache(tmp_path / f"{kind}-{cache}", cache, **options)
        for kind, options in kinds.items()
        for cache in ("fp16", "int8")
    }

    found = on_device("look_at_graph.py", *paths.values())

    launches = {one: found[path]["launches"] for one, path in paths.items()}
    more = {kind: launches[kind, "int8"] - launches[kind, "fp16"] for kind in kinds}
    assert more["four"] == 0 < more["six"] == more["bound"]


def write_with_cache(directory: Path, cache: CacheDtype, **options: Any) -> str:
    """Write a decoder of the shape of Llama in float16; return the path of its graph."""
    config = TransformerConfig.of({**MODELS["llama"], "vocab_size": 256, **options})
    save_checkpoint(directory / "checkpoint", "tiny", build_model(config).eval(), word_tokenizer())
    checkpoint = load_checkpoint(directory / "checkpoint")
    form = PackageFormat.of("cuda", "fp16", None, cache)
    write_graphs(build_package_graphs(checkpoint, form), directory)
    return str(directory / "decoder.onnx")
