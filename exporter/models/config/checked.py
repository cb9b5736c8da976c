"""Tells what is wrong with single options and what does not go together at once."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    ModelWrapValidatorHandler,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from pydantic_core import InitErrorDetails

Check = Callable[[], Iterable[str]]  # yields what it finds; it may read options of other groups
Checks = tuple[Check, ...]
_Options = TypeVar("_Options", bound="CheckedOptions")


class CheckedOptions(BaseModel):
    """Options that are refused with all their problems, in one error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @property
    @abstractmethod
    def checks(self) -> Checks:
        """The rules between options."""

    @model_validator(mode="wrap")
    @classmethod
    def _tell_all(cls, given: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        wrong: list[InitErrorDetails] = []
        try:
            known = handler(given)
        except ValidationError as error:
            if not isinstance(given, Mapping):
                raise
            wrong = [_details(one) for one in error.errors(include_url=False)]
            known = _sound_part(cls, given, {str(one["loc"][0]) for one in wrong if one["loc"]})
        problems = [problem for check in known.checks for problem in _found(check, bool(wrong))]
        if problems:
            what = ValueError("; ".join(problems))
            wrong.append({"type": "value_error", "ctx": {"error": what}, "input": given})
        if wrong:
            raise ValidationError.from_exception_data(cls.__name__, wrong)
        return known


def _sound_part(of: type[_Options], given: Mapping[str, Any], wrong: set[str]) -> _Options:
    """Return options without the wrong ones, which are lacking then, their defaults too."""
    sound = {
        name: _coerced(field.annotation, given[name])
        for name, field in of.model_fields.items()
        if name in given and name not in wrong
    }
    construct: Any = of.model_construct  # mypy takes it for that of the bound
    part: _Options = construct(**sound)
    for name in wrong:
        part.__dict__.pop(name, None)
    return part


def _coerced(annotation: Any, value: object) -> object:
    return TypeAdapter[object](annotation).validate_python(value)


def _details(error: Any) -> InitErrorDetails:
    """Return one of `ValidationError.errors()` as a new error takes it."""
    return {
        "type": error["type"],
        "loc": error["loc"],
        "input": error["input"],
        "ctx": error.get("ctx", {}),
    }


def _found(check: Check, lacks_options: bool) -> Iterator[str]:
    """Yield what a check finds, until it reads an option that is lacking."""
    try:
        yield from check()
    except AttributeError:
        if not lacks_options:
            raise
