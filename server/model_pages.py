"""The list of models of a gateway or worker, page by page."""

from __future__ import annotations

from collections.abc import Sequence

from tokenweir.v1 import admin_service_pb2 as pb

from engine.errors import FieldViolation, InvalidRequest


def page_of(models: Sequence[pb.ModelInfo], request: pb.ListModelsRequest) -> pb.ListModelsResponse:
    """Return a page of a list by name; a token is the last name of the page before.

    Raises InvalidRequest for a size below 0.
    """
    if request.page_size < 0:
        what = f"{request.page_size} is below 0; 0 means all"
        raise InvalidRequest([FieldViolation("page_size", what)])
    rest = [info for info in models if _token(info) > request.page_token]
    page = rest[: request.page_size or None]
    token = _token(page[-1]) if len(page) < len(rest) else ""
    return pb.ListModelsResponse(models=page, next_page_token=token)


def _token(info: pb.ModelInfo) -> str:
    return f"{info.model} {info.model_version}"
