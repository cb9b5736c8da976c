"""How a worker finds the model of a request."""

from __future__ import annotations

import pytest

from engine.errors import CapabilityNotSupported
from server.worker.catalog import Catalog
from tests.fakes.engines import FakeGenerator, FakePredictor


def test_an_engine_is_found_with_what_answers_say_of_its_model() -> None:
    engine = FakeGenerator()
    version = engine.package.manifest.version

    found = Catalog({"dates": engine}, "replica").generating("dates", version)

    assert found.engine is engine
    assert (found.name, found.replica_id) == ("dates", "replica")
    assert found.capabilities == engine.capabilities


def test_a_model_that_cannot_do_it_is_not_found() -> None:
    catalog = Catalog({"tags": FakePredictor()}, "replica")

    with pytest.raises(CapabilityNotSupported, match="cannot generate"):
        catalog.generating("tags", "")
