"""Models of the registry in other sizes: `NAME,FIELD=VALUE,...`, such as `llama-debug,n_layers=1,frozen=norm+output`.

`NAME` says the family and every field that is not given; fields are those of its config. Where a field takes several
names they have `+` between them, as in a bucket plan. No character of it means anything to a shell.

Left out: `rope_scaling`, which is no single value and stays what the named model has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, get_type_hints

from common.errors import ConfigError
from common.models import gpt, llama
from common.models.base import LanguageModel, ModelConfig, hint

CONFIGS: Mapping[str, ModelConfig] = {**llama.CONFIGS, **gpt.CONFIGS}
"""The registry, smallest model of a family first."""
FAMILIES: Mapping[type[ModelConfig], type[LanguageModel]] = {llama.LlamaConfig: llama.Llama, gpt.GPTConfig: gpt.GPT}


def construct(config: ModelConfig) -> LanguageModel:
    """The model that `config` describes, on the current default device.

    Raises:
        ConfigError: a name in `config.frozen` that it does not have.
    """
    return FAMILIES[type(config)](config)


def settable_fields(config: type[ModelConfig]) -> dict[str, str]:
    """The fields that a spec can set, and what each takes, for people."""
    types = get_type_hints(config)
    return {name: _READERS[types[name]][0] for name in types if types[name] in _READERS}


def read_spec(spec: str) -> ModelConfig | None:
    """The config that `spec` describes; None if the registry has no model of its name.

    Raises:
        ConfigError: a field that the model does not have, given twice, or with a value that it cannot take.
    """
    name, *changes = spec.split(",")
    if name not in CONFIGS:
        return None
    config = CONFIGS[name]
    types = get_type_hints(type(config))
    fields = settable_fields(type(config))
    values: dict[str, Any] = {}
    for change in changes:
        field, equals, text = change.partition("=")
        if not equals or field not in fields:
            raise ConfigError(
                f"model {spec!r}: expected FIELD=VALUE, found {change!r}{hint(field, fields)}; fields of {name} are "
                f"{', '.join(fields)}"
            )
        if field in values:
            raise ConfigError(f"model {spec!r}: expected each field once, found {field} twice")
        takes, read = _READERS[types[field]]
        values[field] = read(text)
        if values[field] is None:
            raise ConfigError(f"model {spec!r}: {field}: expected {takes}, found {text!r}")
    return replace(config, **values)


def _whole(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]{1,7}", text) and int(text) else None


def _positive(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 < value < math.inf else None


def _switch(text: str) -> bool | None:
    return {"true": True, "false": False}.get(text)


def _names(text: str) -> tuple[str, ...] | None:
    names = tuple(text.split("+"))
    return names if all(names) else None


_READERS: Mapping[object, tuple[str, Callable[[str], Any]]] = {
    int: ("a whole number from 1 to 9999999", _whole),
    float: ("a number above 0", _positive),
    bool: ("true or false", _switch),
    tuple[str, ...]: ("names with + between them", _names),
}
"""By type of the field: what it takes, and how it is read; None is what it does not take."""
