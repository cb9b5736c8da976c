"""The commands that make checkpoints, and draw what they look at: train, import, explain."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from exporter.tasks import TASKS
from server.cli.extras import needs
from server.cli.interruption import cleaned_up
from server.cli.options import any_path, examples, existing_directory, existing_file

if TYPE_CHECKING:
    from exporter.training.trainer import TrainingReport


@click.command(
    short_help="Train a model and write its checkpoint.",
    epilog=examples(
        "tokenweir train dates --out checkpoints/dates",
        "tokenweir train dates --out checkpoints/dates --resume",
        "tokenweir train text --file a.txt --file b.txt --out checkpoints/text",
    ),
)
@click.argument("task", type=click.Choice(list(TASKS)))
@click.option("--out", required=True, type=any_path, help="Directory of the checkpoint.")
@click.option("--resume", is_flag=True, help="Continue an interrupted run in --out.")
@click.option("--seed", type=int, help="The same seed, the same run.  [default: 0]")
@click.option("--steps", type=click.IntRange(1), help="Optimizer steps.  [default: the task's]")
@click.option(
    "--file", "files", type=existing_file, multiple=True, help="UTF-8 text, for `text` only."
)
@needs("export")
def train(
    task: str, out: Path, resume: bool, seed: int | None, steps: int | None, files: tuple[Path, ...]
) -> None:
    """Train a model for TASK and write its checkpoint to --out.

    \b
    dates      dates as people write them -> ISO 8601      encoder-decoder
    tagging    words -> parts of speech                    sequence labeller
    digits     images of digits -> the digit               ViT
    sentiment  sentences -> positive or negative           BERT
    text       continues a text; needs --file              GPT

    All but `text` make their own data. The last line says how the best checkpoint does on held-out
    data, against the task's target.
    """
    if (task == "text") != bool(files):
        raise click.UsageError(
            "`text` learns from your files: give --file FILE"
            if task == "text"
            else f"--file is for `text`; `{task}` makes its own data"
        )
    from exporter.openmp import let_waiting_threads_sleep

    let_waiting_threads_sleep()  # before torch is loaded
    from exporter.tasks.train import train as train_model

    with cleaned_up():
        report = train_model(task, out, resume=resume, seed=seed, steps=steps, files=files)
    print_report(report)


def print_report(report: TrainingReport) -> None:
    """Say how the training went."""
    click.echo(
        f"{report.steps} steps in {report.seconds:.0f} s, {report.num_parameters:,} parameters; "
        f"the best checkpoint is that of step {report.best_step}"
    )
    click.echo(report.summary)
    click.echo(f"checkpoint: {report.out}")


@click.command(
    "import",
    short_help="Turn a Hugging Face model into a checkpoint.",
    epilog=examples(
        "tokenweir import downloads/gpt2 --out checkpoints/gpt2",
        "tokenweir import downloads/llama --out checkpoints/llama --max-len 4096",
    ),
)
@click.argument("source", type=existing_directory)
@click.option("--out", required=True, type=any_path, help="Directory of the checkpoint.")
@click.option(
    "--max-len", type=click.IntRange(1), help="Tokens of the longest text.  [default: the model's]"
)
@needs("export")
def import_(source: Path, out: Path, max_len: int | None) -> None:
    """Turn the Hugging Face model in the local directory SOURCE into a checkpoint.

    SOURCE holds config.json, the files of the tokenizer and the weights, as `save_pretrained` of
    transformers writes them. Weights are safetensors or PyTorch's own files, of which nothing but
    tensors is read. exporter/README.md lists the families.
    """
    from exporter.huggingface import import_checkpoint
    from server.cli.progress import show_progress

    with cleaned_up(), show_progress("Weights") as progress:
        imported = import_checkpoint(source, out, progress, max_len=max_len)
    click.echo(f"{imported.model_type}, {imported.num_parameters:,} parameters")
    for note in imported.notes:
        click.echo(f"note: {note}")
    click.echo(f"checkpoint: {out}")


@click.command(
    short_help="Draw what the attention heads look at.",
    epilog=examples('tokenweir explain checkpoints/dates "3rd of Feb, 1998" --out heads.png'),
)
@click.argument("checkpoint", type=existing_directory)
@click.argument("text")
@click.option("--target", help="Output to explain.  [default: what the model writes]")
@click.option(
    "--out", type=any_path, default=Path("attention.png"), show_default=True, help="PNG to write."
)
@needs("export")
def explain(checkpoint: Path, text: str, target: str | None, out: Path) -> None:
    """Draw what every attention head of CHECKPOINT looks at in TEXT: layers x heads.

    For a model of images TEXT is the path of one.
    """
    from exporter.checkpoint import load_checkpoint
    from exporter.explain.explain import explain as draw_attention

    draw_attention(load_checkpoint(checkpoint), text, out, target=target)
    click.echo(out)
