"""How a worker finds the model of a request."""

from __future__ import annotations

import pytest

from engine.errors import CapabilityNotSupported
from server.worker.answers import ServedModel
from server.worker.catalog import Catalog
from tests.fakes.engines import FakeGenerator, FakePredictor


def test_an_engine_is_found_with_what_answers_say_of_its_model() -> None:
    engine = FakeGenerator()
    package = engine.package

    found = Catalog({"dates": engine}, "replica").generating("dates", package.manifest.version)

    assert found.engine is engine
    assert found.model == ServedModel("dates", package, engine.capabilities, "replica", "cpu")


def test_a_model_that_cannot_do_it_is_not_found() -> None:
    catalog = Catalog({"tags": FakePredictor()}, "replica")

    with pytest.raises(CapabilityNotSupported, match="cannot generate"):
        catalog.generating("tags", "")
