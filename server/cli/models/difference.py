"""The command that compares two models on what a person has: diff."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from server.cli.exit_codes import FAILED, CommandError
from server.cli.extras import needs
from server.cli.interruption import cleaned_up
from server.cli.models.difference_report import Bound, Report
from server.cli.options import (
    Number,
    any_file,
    examples,
    existing_directory,
    existing_file,
    package_source,
)
from server.cli.progress import show_progress
from server.cli.tables import answers_of

if TYPE_CHECKING:
    from exporter.compare.difference import Difference

_Row = tuple[str, str, str]
_NEW_TOKENS = 32
_DIFFERENCES = {
    "logits": "largest logit difference",
    "scores": "largest score difference",
    "vectors": "1 - cosine of vectors",
}
# The options of models that generate, and of those that answer in one pass.
_OF_WRITING = ("new_tokens", "max_token_loss", "max_chrf_loss")
_OF_ANSWERS = ("images", "max_answer_loss", "max_accuracy_loss")


@click.command(
    "diff",
    epilog=examples(
        "tokenweir diff packages/dates packages/dates-int8 --text lines.txt",
        "tokenweir diff checkpoints/dates packages/dates-int8 --max-token-loss 0.01",
        "tokenweir diff packages/digits packages/digits-int8 --images photos",
    ),
)
@click.argument("one", metavar="A", type=package_source)
@click.argument("other", metavar="B", type=package_source)
@click.option(
    "--text",
    type=existing_file,
    help="A prompt, source or text a line, after a tab a reference.  [default: random tokens]",
)
@click.option(
    "--images",
    type=existing_directory,
    help="PNG and JPEG files, in folders named by their labels.  [default: noise]",
)
@click.option(
    "--new-tokens",
    type=click.IntRange(1),
    help=f"Most tokens that are generated after a line.  [default: {_NEW_TOKENS}]",
)
@click.option(
    "--max-token-loss",
    type=Number(min=0, max=1),
    help="Share of A's tokens for which B may choose another.  [default: 0]",
)
@click.option(
    "--max-chrf-loss",
    type=Number(min=0, max=100),
    help="Points of chrF that B may lose: to references, else to what A writes.",
)
@click.option(
    "--max-answer-loss",
    type=Number(min=0),
    help="Share of A's labels that B may change; for vectors the largest 1 - cosine, for numbers "
    "the largest difference.  [default: 0]",
)
@click.option(
    "--max-accuracy-loss",
    type=Number(min=0, max=1),
    help="Largest drop in the share of references that B predicts, against A.",
)
@click.option("--json", "json_path", type=any_file, help="Write all that was found as JSON.")
@click.option("--markdown", type=any_file, help="Write the table in Markdown.")
@click.option("--junit", type=any_file, help="Write the bounds as test cases of JUnit.")
@needs("export")
def diff(
    one: Path | str,
    other: Path | str,
    json_path: Path | None,
    markdown: Path | None,
    junit: Path | None,
    **given: Any,
) -> None:
    """Compare what B gives with what A gives, on the CPU: packages or checkpoints of one model.

    A directory of Hugging Face, or ORG/NAME[@REVISION] of its Hub, is imported first.

    Models that generate continue every line greedily, without banned tokens; B is also asked what
    it would choose at the position of every token of A. A line is a prompt or a source, and may
    have a tab and a reference after it.

    Others give labels or vectors. A text may have a tab and its label after it; a pair of texts,
    with a tab between them, another tab and its label; for a labeller a label for every word. The
    command fails if B loses more than the bounds allow.
    """
    from exporter.compare.sides import generates
    from exporter.compare.two_models import compare
    from server.packages.build import build_checkpoint, is_package

    with cleaned_up():
        one, other = (
            Path(side) if is_package(side) else build_checkpoint(side) for side in (one, other)
        )
    is_writing = generates(one)
    _refuse(one, given, _OF_ANSWERS if is_writing else _OF_WRITING)
    new = given["new_tokens"] or _NEW_TOKENS
    with cleaned_up(), show_progress("Comparing") as progress:
        found = compare(one, other, given["text"], given["images"], new, progress)
    kind = "token" if is_writing else "answer"
    bounds = [Bound(f"{kind} loss", found.answer_loss, given[f"max_{kind}_loss"] or 0.0)]
    if (allowed := given["max_chrf_loss"]) is not None:
        bounds.append(Bound("chrF loss", found.chrf_loss, allowed))
    if (allowed := given["max_accuracy_loss"]) is not None:
        if found.accuracy_loss is None:
            raise click.UsageError("--max-accuracy-loss needs labels; --text has none")
        bounds.append(Bound("accuracy loss", found.accuracy_loss, allowed))
    losses = {"chrf_loss": found.chrf_loss, "accuracy_loss": found.accuracy_loss}
    report = Report(list(_rows(found)), found.first, bounds, {**asdict(found), **losses})
    report.show()
    report.write(json_path=json_path, markdown=markdown, junit=junit)
    if report.missed:
        raise CommandError(f"{other} loses more than is allowed: {report.missed[0]}", FAILED)


def _refuse(path: Path, given: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Refuse options that are for models of another kind."""
    wrong = [f"--{name.replace('_', '-')}" for name in names if given[name] is not None]
    if wrong:
        what = "generates" if names == _OF_ANSWERS else "does not generate"
        raise click.UsageError(f"{path} {what}; leave out {' and '.join(wrong)}")


def _rows(found: Difference) -> Iterator[_Row]:
    """Yield a name, and what was found of A and of B; of both together in the last column."""
    answers, items = ("answers", "texts") if found.compared else ("tokens", "lines")
    yield f"{answers} equal", "", _of(found.answers_equal, found.answers)
    if not found.compared or found.items != found.answers:
        yield f"{items} equal", "", f"{found.items_equal:,} of {found.items:,}"
    for name, quantiles in found.quantiles.items():
        shown = (f"{quantile} {value:.2g}" for quantile, value in quantiles.items())
        yield _DIFFERENCES[name], "", ", ".join(shown)
    if found.chrf_between is not None:
        yield "chrF of B to A", "", f"{found.chrf_between:.1f}"
    if found.compared:
        for name, value in answers_of(found.compared):
            yield name, "", value
    for title, fact, form in (
        ("perplexity", "perplexity", ".4f"),
        ("chrF to references", "chrf", ".1f"),
        ("BLEU to references", "bleu", ".1f"),
        (f"accuracy on {found.references:,} references", "accuracy", ".2%"),
        ("items/s" if found.compared else "tokens/s", "per_second", ",.0f"),
        ("bytes", "num_bytes", ",d"),
    ):
        values = [getattr(side, fact) for side in (found.one, found.other)]
        if any(value is not None for value in values):
            told = ["" if value is None else format(value, form) for value in values]
            yield title, told[0], told[1]


def _of(equal: int, total: int) -> str:
    return f"{equal:,} of {total:,} ({equal / total:.2%})"
