"""OmegaConf's configs, which Hydra hands to programs: the values under keys, where nothing else decides them.

An interpolation (`${train.lr}`) depends on other keys, and a missing value (`???`) is an error. From a part
that is handed on, a list too, code may come to all others, since each part knows the whole config, and reads
flags and types there. In these cases the whole config counts.

Must never: import OmegaConf, or resolve an interpolation.
"""

from __future__ import annotations

from typing import Any

#: There is no such part, or something else decides it.
MISSING = object()


def is_config(value: Any) -> bool:
    """Whether a value is a config that finds values by keys."""
    return type(value).__module__ == "omegaconf.dictconfig"


def is_list(value: Any) -> bool:
    """Whether a value is a list of a config."""
    return type(value).__module__ == "omegaconf.listconfig"


def attribute(config: Any, name: str) -> Any:
    """The value that `config.name` gives, or `MISSING`. Names of a config's own methods are none of its
    keys.
    """
    taken = name in vars(config) or any(name in vars(base) for base in type(config).__mro__)
    return MISSING if taken else element(config, name)


def element(config: Any, key: str) -> Any:
    """The value that `config[key]` gives, or `MISSING`."""
    content = vars(config).get("_content")
    return _value(content[key]) if type(content) is dict and key in content else MISSING


def _value(node: Any) -> Any:
    if is_config(node) or is_list(node):
        return node
    if not type(node).__module__.startswith("omegaconf."):
        return MISSING
    value = vars(node).get("_val", MISSING)
    return MISSING if isinstance(value, str) and ("${" in value or value == "???") else value
