"""OmegaConf's configs, which Hydra hands to programs: what lies under a key, where nothing else decides it.

Each node of a config knows the whole config, so a node counts by what lies in it. An interpolation
(`${train.lr}`) depends on other keys, a missing value (`???`) is an error, and types that a config was given
decide what can be written to it: parts of these kinds are not told here, and the whole config counts.

Must never: import OmegaConf, or resolve an interpolation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: There is no such part, or something else decides it.
MISSING = object()
_UNTYPED = (None, Any, dict, list)
_ABOUT_TYPES = ("ref_type", "object_type", "element_type")


def is_config(value: Any) -> bool:
    """Whether a value is a config that finds values by keys."""
    return type(value).__module__ == "omegaconf.dictconfig"


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


def leaves(value: Any) -> list[tuple[str, Any]] | None:
    """All values of a config or of a list in one, each with its steps in paths. None if `value` is neither,
    or counts with the whole config.
    """
    if not _is_node(value):
        return None
    found = [*_leaves(value, "")]
    return None if any(leaf is MISSING for _, leaf in found) else found


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if not _is_node(value):
        yield path, value
        return
    content = vars(value).get("_content")
    if type(content) not in (dict, list) or not _is_untyped(value):
        yield path, MISSING
        return
    yield path, type(content)
    for key, node in content.items() if isinstance(content, dict) else enumerate(content):
        yield from _leaves(_value(node), f"{path}[{key!r}]")


def _is_untyped(node: Any) -> bool:
    about = vars(vars(node)["_metadata"])
    return all(any(about.get(name) is usual for usual in _UNTYPED) for name in _ABOUT_TYPES)


def _is_node(value: Any) -> bool:
    return type(value).__module__ in ("omegaconf.dictconfig", "omegaconf.listconfig")


def _value(node: Any) -> Any:
    if _is_node(node):
        return node
    if not type(node).__module__.startswith("omegaconf."):
        return MISSING
    value = vars(node).get("_val", MISSING)
    return MISSING if isinstance(value, str) and ("${" in value or value == "???") else value
