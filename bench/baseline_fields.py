"""The fields of a baseline's file: each of the outermost type that was written; what is not is named by its place."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

from common.errors import ConfigError

_WORDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    NoneType: "null",
    list: "a list",
    dict: "an object",
}


def checked(kind: type, data: object, where: str) -> dict[str, Any]:
    """`data`, an object whose fields have the JSON types of those of the dataclass `kind`, no number below 0.

    A field that is missing or unknown is for the constructor of `kind` to refuse.

    Args:
        where: what the object is called in the file.

    Raises:
        ConfigError: another type, or a number below 0.
    """
    found = check_type(data, (dict,), where)
    for name, hint in get_type_hints(kind).items():
        if name in found:
            value = check_type(found[name], _stored(hint), f"{where}.{name}")
            if isinstance(value, (int, float)) and not value >= 0:
                raise ConfigError(f"{where}.{name}: expected a number of at least 0, found {value!r}")
    return dict(found)


def check_type(value: object, kinds: tuple[type, ...], where: str) -> Any:
    """`value`, if it is of one of these types; true and false are no numbers.

    Raises:
        ConfigError: it is not.
    """
    if type(value) not in kinds:
        expected = " or ".join(_WORDS[kind] for kind in kinds)
        raise ConfigError(f"{where}: expected {expected}, found {value!r}")
    return value


def _stored(hint: Any) -> tuple[type, ...]:
    """The types that JSON has for a field of this type."""
    origin = get_origin(hint)
    if origin is UnionType:
        return tuple(kind for part in get_args(hint) for kind in _stored(part))
    if origin is not None:
        return (dict,) if issubclass(origin, Mapping) else (list,)
    if hint is float:
        return int, float
    return (str,) if issubclass(hint, str) else (hint,)
