"""The list of tasks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from engine.errors import ConfigError
from exporter.models import TransformerConfig
from exporter.tasks import build_task, made
from exporter.training.evaluation import Evaluation
from tests.emulated.models import MODELS


def test_an_unknown_task_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match="no task 'date'; the tasks are: dates, tagging, digits"):
        build_task("date")


def test_files_are_for_text_only() -> None:
    with pytest.raises(ConfigError, match="digits makes its own data and takes no files"):
        build_task("digits", files=[Path("x.txt")])


@pytest.mark.parametrize("name", made.MADE)
def test_a_task_has_its_name_a_target_and_data_that_are_the_same_every_time(
    name: str, few_examples: None
) -> None:
    task, again, other = build_task(name), build_task(name), build_task(name, seed=1)

    def sources(examples: Iterable[object]) -> list[list[object]]:
        return [example.source.tolist() for example in examples]  # type: ignore[attr-defined]

    assert task.name == name and "target 9" in task.judge(Evaluation(1, 1, 1.0, 1, 1)).summary
    assert task.config.vocab_size == (task.tokenizer.get_vocab_size() if task.tokenizer else 0)
    assert len(task.validation) > 50 and len(task.held_out) > 50
    assert shape(task.config) == shape(TransformerConfig.of(MODELS[name]))
    assert task.data_fingerprint == again.data_fingerprint
    assert sources(task.chunks(3)) == sources(again.chunks(3)) != sources(task.chunks(4))
    assert sources(task.chunks(3)) != sources(other.chunks(3))
    assert sources(task.held_out) == sources(other.held_out)


def test_the_text_model_of_the_emulated_device_is_that_of_the_task(tmp_path: Path) -> None:
    path = tmp_path / "story.txt"
    path.write_text("".join(f"This is line {i} of a long story.\n" for i in range(1000)))

    found = build_task("text", files=[path]).config

    assert shape(found) == shape(TransformerConfig.of(MODELS["text"]))


def shape(config: TransformerConfig) -> TransformerConfig:
    """Return a configuration without what may differ where no kernel computes."""
    same = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    same |= {"max_source_len": 48, "max_target_len": 48, "num_token_types": 0, "norm_eps": 1e-5}
    layers = {
        name: min(getattr(config, name), 2) for name in ("num_encoder_layers", "num_decoder_layers")
    }
    return config.model_copy(update={"dropout": 0.0, **same, **layers})


def test_the_list_of_tasks_needs_no_torch() -> None:
    code = "import exporter.tasks, sys; assert 'torch' not in sys.modules"

    subprocess.run([sys.executable, "-c", code], check=True)
