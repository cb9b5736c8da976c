"""The settings of a server: every value, and whether a file, an option or a default says it.

A file is TOML. Its sections are dataclasses: `[serve]` has the fields of ServeConfig that are no
dataclass themselves, every other section those of one that is. Servers that run by themselves have
the same file; of theirs `serve` does not look at `[kserve]`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

from engine.errors import ConfigError
from server.config import FOLLOWING, GatewayRoleConfig, LogConfig, ServeConfig
from server.front_config import FrontConfig, HttpConfig, KserveConfig
from server.identity.config import CERTIFICATES
from server.packages.address import is_remote
from server.setting_checks import nearest

_OWN = "serve"  # the section of ServeConfig's own fields
_OF_FRONTS = (
    *("serve.host", "serve.grace", "log"),
    *(f"gateway.doors.{name}" for name in (*CERTIFICATES, "insecure")),
)


@dataclass(frozen=True)
class Role:
    """A command that runs by itself with the file of a service: what of it counts there."""

    counting: Sequence[str] = ()  # settings, and sections as a whole; of `serve` all that there are
    defaults: Mapping[str, Any] = field(default_factory=dict)  # those that differ


ROLES: Mapping[str, Role] = {
    "serve": Role(defaults={"engine.max_num_seqs": 0}),  # chosen for the device
    "gateway": Role(
        (
            *("serve.name", "serve.host", "serve.port", "serve.grace"),
            *("gateway", "log", "metrics", "tracing"),
        ),
        {"gateway.prefix_affinity": True},
    ),
    "http": Role((*_OF_FRONTS, "serve.http_port", "http"), {"serve.http_port": HttpConfig.port}),
    "kserve": Role((*_OF_FRONTS, "kserve")),
}


@dataclass(frozen=True)
class Setting:
    """A value, and what says so: "default", the name of a file, or an option."""

    value: Any
    origin: str


class Settings:
    """Settings by name, such as "serve.port"; what is given later wins."""

    def __init__(self, command: str = "serve") -> None:
        """`command` decides the defaults, and which settings are told."""
        self._role = ROLES[command]
        found = [*_sections(ServeConfig, _OWN), *_sections(KserveConfig, "kserve")]
        self._sections = {name: owner for name, owner in found if name not in FOLLOWING}
        self._types = {
            f"{section}.{name}": kind
            for section, owner in self._sections.items()
            for name, kind in get_type_hints(owner).items()
            if not is_dataclass(kind)
        }
        for name in FOLLOWING:
            self._types.pop(name, None)
        self._given: dict[str, Setting] = {}

    def read(self, path: Path) -> None:
        """Take in a file; paths in it are relative to it.

        Raises ConfigError for what is not TOML, an unknown key, or a value of another type.
        """
        try:
            document = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not TOML: {error}") from error
        self.take(document, str(path), path.parent)

    def take(self, document: Mapping[str, Any], origin: str, folder: Path) -> None:
        """Take in the sections of a document; paths in it are relative to the folder.

        Raises ConfigError for an unknown key, or a value of another type, with the origin.
        """
        for name, value in self._leaves(document, origin):
            self.give(name, self._typed(name, value, origin, folder), origin)

    def give(self, name: str, value: Any, origin: str) -> None:
        """Set one value."""
        self._given[name] = Setting(value, origin)

    def __contains__(self, name: str) -> bool:
        """Return whether a file or an option has set this."""
        return name in self._given

    def __getitem__(self, name: str) -> Setting:
        """Return a setting."""
        if name in self._given:
            return self._given[name]
        section, _, key = name.rpartition(".")
        (found,) = (one for one in fields(self._sections[section]) if one.name == key)
        return Setting(self._role.defaults.get(name, _default(found)), "default")

    def config(self) -> ServeConfig:
        """Return the settings; ConfigError, with file and key, where they are out of bounds."""
        config: ServeConfig = self._make(_OWN)
        return config

    def gateway_role(self, ray_address: str) -> GatewayRoleConfig:
        """Return those of a gateway by itself."""
        own = {key: self[f"{_OWN}.{key}"].value for key in ("name", "grace")}
        place = {key: self[f"{_OWN}.{key}"].value for key in ("host", "port")}
        parts = {name: self._make(name) for name in ("log", "metrics", "tracing")}
        gateway = replace(self._make("gateway"), **place)
        return GatewayRoleConfig(ray_address, **own, gateway=gateway, **parts)

    def http(self, admin_token: str | None) -> HttpConfig:
        """Return those of an HTTP server by itself."""
        front: HttpConfig = self._front("http")
        return replace(front, port=self[f"{_OWN}.http_port"].value, admin_token=admin_token)

    def kserve(self) -> KserveConfig:
        """Return those of a KServe server by itself."""
        front: KserveConfig = self._front("kserve")
        return front

    def log(self) -> LogConfig:
        """Return those of what is logged."""
        log: LogConfig = self._make("log")
        return log

    def _front(self, section: str) -> Any:
        host, grace = (self[f"{_OWN}.{key}"].value for key in ("host", "grace"))
        front: FrontConfig = self._make(section)
        return front.beside(host, grace, self._make("gateway.doors"))

    def check(self) -> None:
        """Raise what `config` raises, except for what it takes packages to see."""
        if self[f"{_OWN}.packages"].value:
            self.config()
        for section in self._sections:
            if section != _OWN:
                self._make(section)

    def lines(self) -> Iterator[str]:
        """Return what counts as a file that `read` takes, each with where it came from."""
        for section, owner in self._sections.items():
            names = (f"{section}.{key}" for key in get_type_hints(owner))
            if found := [line for name in names if self._counts(name) for line in self._line(name)]:
                yield from (f"[{section}]", *found, "")

    def _counts(self, name: str) -> bool:
        counting = self._role.counting
        return not counting or any(f"{name}.".startswith(f"{one}.") for one in counting)

    def _line(self, name: str) -> Iterator[str]:
        key = name.rpartition(".")[2]
        if name in FOLLOWING:
            yield f"# {key} follows from {FOLLOWING[name]}"
        elif name in self._types:
            setting = self[name]
            is_missing = setting.value is None or setting.value == {}
            text = f"# {key} is not set" if is_missing else f"{key} = {_toml(setting.value)}"
            yield f"{text}  # {setting.origin}"

    def _make(self, section: str) -> Any:
        """Return the dataclass of a section, those inside it made first."""
        owner = self._sections[section]
        values: dict[str, Any] = {}
        for key, kind in get_type_hints(owner).items():
            name = f"{section}.{key}"
            inner = key if section == _OWN else name
            if name in self._types:
                values[key] = self[name].value
            elif is_dataclass(kind) and inner not in FOLLOWING:
                values[key] = self._make(inner)
        try:
            return owner(**values)
        except ConfigError as error:
            raise ConfigError(f"{self._blamed(section, str(error))}{error}") from error

    def _blamed(self, section: str, message: str) -> str:
        """Return the origin and name of the values of a section that an error speaks of."""
        found = [
            f"{setting.origin}, {name}: "
            for name, setting in self._given.items()
            if name.rpartition(".")[0] == section and name.rpartition(".")[2] in message
        ]
        return next(iter(found), "")

    def _leaves(
        self, table: Mapping[str, Any], origin: str, section: str = ""
    ) -> Iterator[tuple[str, Any]]:
        """Return all values by name; ConfigError for the first name that there is not."""
        for key, value in table.items():
            name = f"{section}.{key}" if section else key
            if name in FOLLOWING:
                raise ConfigError(f"{origin}: {name} follows from {FOLLOWING[name]}; leave it out")
            if name in self._types:
                yield name, value
            elif name in self._sections and isinstance(value, dict):
                yield from self._leaves(value, origin, name)
            elif any(known.startswith(f"{name}.") for known in self._types):
                raise ConfigError(f"{origin}: {name} is a section, [{name}], not a value")
            else:
                unknown = _first_leaf(name, value)
                raise ConfigError(
                    f"{origin}: there is no setting {unknown}; the nearest is "
                    f"{nearest(unknown, self._types)}"
                )

    def _typed(self, name: str, value: Any, origin: str, folder: Path) -> Any:
        """Return a value of the type that a setting has."""
        # Not above: commands without a file need no extra.
        from pydantic import TypeAdapter, ValidationError

        kind = self._types[name]
        value = _as_paths(value, kind, folder)
        try:
            # Strictly: "8" is not a number, and 1 is not true.
            return TypeAdapter(kind, config={"strict": True}).validate_python(value)
        except ValidationError as error:
            (first, *_) = error.errors()
            where = f"{name}{_keys(value, first['loc'])}"
            raise ConfigError(
                f"{origin}: {where} ({first['input']!r}) is of the wrong type: {first['msg']}"
            ) from error


def _keys(value: Any, place: tuple[int | str, ...]) -> str:
    """Return the keys that lead to a place in a value; what follows them there names a type."""
    keys = ""
    for part in place:
        if not isinstance(value, dict) or part not in value:
            break
        keys, value = f"{keys}.{part}", value[part]
    return keys


def _sections(owner: type, name: str) -> Iterator[tuple[str, type]]:
    """Return the dataclasses within one, itself first, by the names of their sections."""
    yield name, owner
    for key, kind in get_type_hints(owner).items():
        if isinstance(kind, type) and is_dataclass(kind):
            inner = key if name == _OWN else f"{name}.{key}"
            yield from _sections(kind, inner)


def _default(found: Field[Any]) -> Any:
    if found.default_factory is not MISSING:
        return found.default_factory()
    return {} if found.default is MISSING else found.default  # packages have none


def _first_leaf(name: str, value: Any) -> str:
    """Return the name of the first value below, for what it may have been meant to be."""
    while isinstance(value, dict) and value:
        key, value = next(iter(value.items()))
        name = f"{name}.{key}"
    return name


def _as_paths(value: Any, kind: Any, directory: Path) -> Any:
    """Return a value with paths for texts where its type has paths, and no lists: TOML has both."""
    takes_path = kind is Path or any(Path in (one, *get_args(one)) for one in get_args(kind))
    match value:
        case list():
            return tuple(_as_paths(one, kind, directory) for one in value)
        case dict() if takes_path:
            return {key: _as_paths(one, Path, directory) for key, one in value.items()}
        case str() if takes_path and is_remote(value):
            return value
        case str() if takes_path:
            return (directory / value).resolve()
    return value


def _toml(value: Any) -> str:
    """Return a value as TOML writes it."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case Path():  # a file's own paths are relative to it
            return _toml(str(value.absolute()))
        case tuple():
            return f"[{', '.join(map(_toml, value))}]"
        case dict():
            pairs = (f"{_toml(key)} = {_toml(one)}" for key, one in value.items())
            return f"{{{', '.join(pairs)}}}"
    return json.dumps(str(value), ensure_ascii=False)  # TOML knows no halves of characters
