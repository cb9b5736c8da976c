"""The settings that a file and options give: every value, and what says it."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from difflib import get_close_matches
from os.path import expanduser
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from engine.errors import ConfigError
from engine.setting import check_value
from server.packages.address import is_remote
from server.settings import Settings


class Known(NamedTuple):
    """A setting that there is."""

    section: str
    field: Field[Any]
    type: Any

    @property
    def name(self) -> str:
        """Its name in messages, such as "listen.port"."""
        return f"{self.section}.{self.field.name}"


SECTIONS: Mapping[str, type] = get_type_hints(Settings)
KNOWN: Mapping[str, Known] = {
    known.name: known
    for section, owner in SECTIONS.items()
    for one in fields(owner)
    if "help" in one.metadata
    for known in [Known(section, one, get_type_hints(owner)[one.name])]
}
_OF_ADAPTERS = ("listen.host", "listen.grace", "tls", "auth.insecure", "log")


@dataclass(frozen=True)
class Command:
    """A command that takes settings: which of them, and how they differ there."""

    sections: Sequence[str]  # sections as a whole, and single settings
    defaults: Mapping[str, Any] = field(default_factory=dict)
    without_option: Sequence[str] = ()
    options: Mapping[str, str] = field(default_factory=dict)  # those of another name

    def takes(self, name: str) -> bool:
        """Return whether a setting means something to the command."""
        return name in self.sections or name.partition(".")[0] in self.sections

    def option(self, known: Known) -> str | None:
        """Return the option of a setting that the command takes; None if it has none."""
        if not self.takes(known.name) or known.name in self.without_option:
            return None
        own: str | None = known.field.metadata["option"]
        return self.options.get(known.name, own)


# Beside --tls-cert and --tls-key, with which they call the server behind.
_TLS_OF_ADAPTERS = {
    f"tls.{name}": f"--listen-tls-{name.replace('_', '-')}" for name in ("cert", "key", "client_ca")
}
COMMANDS: Mapping[str, Command] = {
    "serve": Command(
        [name for name in SECTIONS if name != "kserve"],
        without_option=("http.timeout", "http.max_body_bytes"),
    ),
    "gateway": Command(
        (
            *("listen", "tls", "auth", "admin", "log", "metrics", "tracing"),
            *("limits.max_concurrent_calls", "limits.max_open_bytes", "limits.worker_wait"),
            *("limits.worker_keepalive_timeout", "limits.client_keepalive_timeout"),
            "limits.contended_calls_per_worker",
        ),
        defaults={"listen.prefix_affinity": True},
        without_option=("listen.gateway",),
    ),
    "http": Command(
        (*_OF_ADAPTERS, "http"),
        defaults={"http.port": 8000},
        options={**_TLS_OF_ADAPTERS, "http.port": "--port"},
    ),
    "kserve": Command((*_OF_ADAPTERS, "kserve"), options=_TLS_OF_ADAPTERS),
}


class Given(NamedTuple):
    """A value, and what says so: "default", the name of a file, or an option."""

    value: Any
    origin: str


class GivenSettings:
    """Settings by name, such as "listen.port"; what is given later wins."""

    def __init__(self, command: str = "serve") -> None:
        """`command` decides the defaults, and which settings are told."""
        self._command = COMMANDS[command]
        self._given: dict[str, Given] = {}

    def read(self, path: Path) -> None:
        """Take in a file; paths in it are relative to it.

        Raises ConfigError for what is not TOML, an unknown key, or a value that cannot be.
        """
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, too
            raise ConfigError(f"{path} is not TOML: {error}") from error
        self.take(document, str(path), path.parent)

    def take(self, document: Mapping[str, Any], origin: str, folder: Path) -> None:
        """Take in the sections of a document; paths in it are relative to the folder.

        Raises ConfigError for an unknown key, or a value that cannot be, with the origin.
        """
        for section, table in ((str(key), table) for key, table in document.items()):
            if section in SECTIONS and not isinstance(table, dict):
                raise ConfigError(f"{origin}: {section} is a section, [{section}], not a value")
            for name in _names(section, table):
                if name not in KNOWN or section not in SECTIONS:  # "listen.port" = 1 is none
                    told = name if name.isprintable() and name not in KNOWN else repr(name)
                    (nearest,) = get_close_matches(name, KNOWN, 1, cutoff=0.0)
                    raise ConfigError(
                        f"{origin}: there is no setting {told}; the nearest is {nearest}"
                    )
                value = _checked(KNOWN[name], table[KNOWN[name].field.name], origin, folder)
                self.give(name, value, origin)

    def give(self, name: str, value: Any, origin: str) -> None:
        """Set one value."""
        self._given[name] = Given(value, origin)

    def __contains__(self, name: str) -> bool:
        """Return whether a file or an option has set this."""
        return name in self._given

    def __getitem__(self, name: str) -> Given:
        """Return a setting."""
        if name in self._given:
            return self._given[name]
        return Given(self._command.defaults.get(name, default_of(KNOWN[name].field)), "default")

    def settings(self) -> Settings:
        """Return the settings; ConfigError, with file and key, where they do not fit together."""
        low, high = self["engine.min_replicas"].value, self["engine.max_replicas"].value
        if low > high and "engine.max_replicas" not in self:  # it follows
            self.give("engine.max_replicas", low, "engine.min_replicas")
        buckets = self["engine.decode_buckets"].value
        if buckets and "engine.max_num_seqs" not in self:
            self.give("engine.max_num_seqs", max(buckets), "engine.decode_buckets")
        taken = {known.section for known in KNOWN.values() if self._command.takes(known.name)}
        return Settings(**{name: self._section(name, SECTIONS[name]) for name in taken})

    def served(self) -> Settings:
        """Return the settings of a gateway; ConfigError too for one that strangers could reach."""
        settings = self.settings()
        try:
            settings.check_ports()
            settings.check_reach()
        except ConfigError as error:
            raise ConfigError(f"{self._origin(str(error), self._given)}{error}") from error
        return settings

    def lines(self) -> Iterator[str]:
        """Return what the command takes as a file that `read` takes, each with what says it."""
        for section in SECTIONS:
            names = [name for name, known in KNOWN.items() if known.section == section]
            if names := list(filter(self._command.takes, names)):
                yield f"[{section}]"
                for name in names:
                    key, (value, origin) = KNOWN[name].field.name, self[name]
                    origin = origin if origin.isprintable() else ascii(origin)
                    text = f"# {key} is not set" if value is None else f"{key} = {as_toml(value)}"
                    yield f"{text}  # {origin}"
                yield ""

    def _section(self, section: str, owner: type) -> Any:
        known = [one for one in KNOWN.values() if one.section == section]
        try:
            return owner(**{one.field.name: self[one.name].value for one in known})
        except ConfigError as error:
            names = [one.name for one in known]
            raise ConfigError(f"{self._origin(str(error), names)}{error}") from error

    def _origin(self, message: str, names: Iterable[str]) -> str:
        """Return what has given the first of the settings that a message speaks of."""
        given = [name for name in names if name in self._given]
        told = sorted((name for name in given if name in message), key=message.find)
        told += [name for name in given if name.rpartition(".")[2] in message]
        for name in told:
            origin = self._given[name].origin
            return f"{origin}: " if origin.startswith("--") else f"{origin}, {name}: "
        return ""


def default_of(found: Field[Any]) -> Any:
    """Return the value that a setting has if nothing is said."""
    return found.default_factory() if callable(found.default_factory) else found.default


def _names(section: str, table: Any) -> list[str]:
    """Return the names of what stands in a section, or of one that there is not."""
    if section in SECTIONS:
        return [f"{section}.{key}" for key in table]
    while isinstance(table, dict) and table:
        key, table = next(iter(table.items()))
        section = f"{section}.{key}"
    return [section]


def _checked(known: Known, value: Any, origin: str, folder: Path) -> Any:
    """Return a value of a document as a setting has it; ConfigError for one that cannot be."""
    # Not above: commands without a file need no extra.
    from pydantic import TypeAdapter, ValidationError

    if "\\x00" in repr(value):
        raise ConfigError(f"{origin}: {known.name} ({value!r:.200}) has a character of code 0")
    kind: TypeAdapter[Any] = TypeAdapter(known.type, config={"strict": True})
    try:
        # Strictly: "8" is not a number, and 1 is not true. In JSON a path is a text, as in TOML.
        found = kind.validate_json(json.dumps(value, default=lambda date: [str(date)]))
    except ValidationError as error:
        (first, *_) = error.errors()
        keys = [str(key) for key in first["loc"] if isinstance(value, dict) and key in value]
        where = ".".join([known.name, *keys])
        raise ConfigError(
            f"{origin}: {where} ({first['input']!r:.200}) cannot be used: {first['msg']}"
        ) from error
    check_value(f"{origin}: {known.name}", found, known.field.metadata)
    return _placed(found, folder)


def _placed(value: Any, folder: Path) -> Any:
    """Return a value with its paths as those of a folder, and ~ as the home directory."""
    match value:
        case Path():
            # Links stay: a renewed certificate or list of tokens is often another end of the same.
            return (folder / expanduser(value)).absolute()
        case dict():
            return {
                key: place if is_remote(place) else (folder / expanduser(place)).resolve()
                for key, place in value.items()
            }
    return value


def as_toml(value: Any) -> str:
    """Return a value as TOML writes it."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case Path():  # a file's own paths are relative to it
            return as_toml(str(value.absolute()))
        case tuple():
            return f"[{', '.join(map(as_toml, value))}]"
        case dict():
            pairs = (f"{as_toml(key)} = {as_toml(one)}" for key, one in value.items())
            return f"{{{', '.join(pairs)}}}"
    try:
        str(value).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{value!a} is not UTF-8, as TOML is; give it another name") from error
    # TOML knows no halves of characters, and no bare DEL.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
