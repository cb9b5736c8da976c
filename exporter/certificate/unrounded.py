"""Shows that the graphs of a format that rounds are equal to the eager model before they round.

A lost mask or a wrong scale may change less than rounding is allowed to. So the same bodies with
all weights and keys in float32 are held to the bound of packages without loss: a prompt of every
length that is tried up to a chunk and one more, and the longest; sources and beams in groups, rows
in every number; of a one-pass model all.
"""

from __future__ import annotations

from pathlib import Path

from engine.errors import CertificateError
from engine.package.manifest import PackageFormat
from exporter.certificate.alignment import check_alignment
from exporter.certificate.beams import certify_beams
from exporter.certificate.cases import MIN_STEPS, no_progress
from exporter.certificate.comparison import Comparison, exported_graphs
from exporter.certificate.execution import OnCpu
from exporter.certificate.generation_cases import make_cases
from exporter.certificate.one_pass import Pair, certify_encoding, certify_images
from exporter.certificate.row_counts import certify_row_counts
from exporter.certificate.sides import Sides
from exporter.certificate.sources import certify_sources
from exporter.certificate.subject import Subject, subject_of
from exporter.certificate.twin import twin_graphs
from exporter.checkpoint import Checkpoint
from exporter.graphs.target import target_of


def certify_unrounded(checkpoint: Checkpoint, form: PackageFormat) -> None:
    """Raise CertificateError if the graphs of a format differ before they round."""
    plain = PackageFormat(form.target)
    subject = subject_of(checkpoint, plain)
    needs_equal_bits = target_of(form).runs_here
    comparison = Comparison(needs_equal_bits=needs_equal_bits, banned=subject.banned)
    try:
        with twin_graphs(checkpoint, form, plain) as directory:
            _compare(subject, directory, comparison)
    except CertificateError as error:
        raise CertificateError(f"before anything is rounded: {error}") from error


def _compare(subject: Subject, directory: Path, comparison: Comparison) -> None:
    model, contract = subject.model, subject.contract
    if contract.generation:
        _compare_generation(Sides(model, contract.generation, directory, comparison))
        return
    with exported_graphs():
        pair = Pair(model, OnCpu().load_session(directory))
    if contract.encoding:
        certify_encoding(pair, contract.encoding, subject.samples, comparison, no_progress)
        return
    assert contract.image is not None, "a model generates, encodes text, or sees images"
    certify_images(pair, contract.image, comparison, no_progress)


def _compare_generation(sides: Sides) -> None:
    cases = make_cases(sides.contract, (), 1, MIN_STEPS, sides.comparison.banned)
    longest = max(len(case.prompt) for case in cases)
    for case in cases:
        if sides.chunk + 1 < len(case.prompt) < longest:
            continue
        seen, tokens, _ = sides.check_alone(case)
        if sides.contract.alignment:
            check_alignment(sides, case, tokens, seen, "alone")
    if sides.contract.cross_cache:
        certify_sources(sides, [case.source for case in cases])
    certify_beams(sides)
    certify_row_counts(sides)
