"""OmegaConf's configs: what code reads of one by name counts, with all on which it depends, and no more.

How code may read settings is tested in `test_settings.py`, with configs among them.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Any, cast

import pytest
from omegaconf import DictConfig, OmegaConf

from castore.adapters.noted_globals import bindings_of
from castore.keys.objects import function_fingerprint

START = {
    "train": {"lr": 0.1, "sizes": [1, 2]},
    "data": {"n": 5, "inner": {"depth": 1}},
    "from_another": "${train.lr}",
    "items": 4,
}
CHANGES: dict[str, Any] = {
    "train.lr": 0.2, "train.sizes": [1, 3], "data.n": 6, "data.inner.depth": 2, "data.new": 1, "items": 5,
    "new": 1,
}  # fmt: skip


@dataclasses.dataclass
class Model:
    width: int = 3
    depth: int = 4


def largest(config: DictConfig) -> int:
    return max(config.values(), key=str)  # type: ignore[no-any-return]


READS: dict[str, tuple[Callable[[DictConfig], Callable[[int], object]], set[str]]] = {
    "an attribute": (lambda cfg: lambda x: x * cfg.data.n, {"data.n"}),
    "an element": (lambda cfg: lambda x: x * cfg["data"]["n"], {"data.n"}),
    "both": (lambda cfg: lambda x: x * cfg["data"].n, {"data.n"}),
    "a list": (lambda cfg: lambda x: x * sum(cfg.train.sizes), {*CHANGES}),
    "a part": (lambda cfg: lambda x: largest(cfg.data), {*CHANGES}),
    "a key that is a method's name, too": (lambda cfg: lambda x: x * cfg["items"], {"items"}),
    "a method": (lambda cfg: lambda x: len(cfg.items()), {*CHANGES}),
    "an interpolation": (lambda cfg: lambda x: x * cfg.from_another, {*CHANGES}),
    "all": (lambda cfg: lambda x: str(cfg), {*CHANGES}),
}


@pytest.mark.parametrize("form", READS)
def test_what_code_reads_of_a_config_counts(form: str) -> None:
    make, expected = READS[form]
    before = function_fingerprint(make(OmegaConf.create(START)))
    counted = set()
    for path, value in CHANGES.items():
        config = OmegaConf.create(START)
        OmegaConf.update(config, path, value)
        if function_fingerprint(make(config)) != before:
            counted.add(path)
    assert counted == expected


@pytest.mark.parametrize(
    ("config", "path", "value"),
    [
        ({"a": {"b": "${c}"}, "c": 1}, "c", 2),
        ({"a": {"b": "???"}, "c": 1}, "c", 2),
        ({"a": None, "c": 1}, "a", {}),
        ({"a": [1, {"b": "${c}"}], "c": 1}, "c", 2),
        ({"a": [], "c": 1}, "a", {}),
        ({"a": {"1": 2}, "c": 1}, "a", {1: 2}),
        ({"a": [1, 2], "c": 1}, "a", [2, 1]),
        ({"a": {"b": 1, "d": 2}, "c": 1}, "a", {"d": 2, "b": 1}),
        ({"a": OmegaConf.structured(Model), "c": 1}, "a", {"width": 3, "depth": 4}),
        ({"a": OmegaConf.structured(Model), "c": 1}, "a.width", 4),
    ],
)
def test_a_part_counts_with_all_on_which_it_depends(config: dict[str, Any], path: str, value: Any) -> None:
    cfg = OmegaConf.create(config)
    function = lambda x: str(cfg.a)  # noqa: E731
    before = function_fingerprint(function)
    OmegaConf.update(cfg, path, value, merge=False)
    assert function_fingerprint(function) != before


def test_a_field_of_a_structured_config_counts_alone() -> None:
    cfg = OmegaConf.create({"model": OmegaConf.structured(Model), "lr": 0.1})
    function = lambda x: x * cfg.model.width  # noqa: E731
    before = function_fingerprint(function)
    cfg.lr, cfg.model.depth = 0.2, 5
    assert function_fingerprint(function) == before
    cfg.model.width = 5
    assert function_fingerprint(function) != before


@pytest.mark.parametrize(
    "read",
    [
        lambda cfg: lambda x: OmegaConf.merge(cfg.data, {"rate": "${train.lr}"}).rate,
        lambda cfg: lambda x: OmegaConf.select(cfg.data, "..train.lr"),
        lambda cfg: lambda x: cfg.data._get_root().train.lr,
    ],
    ids=["merged with an interpolation", "selected", "by the root"],
)
def test_what_code_reaches_from_a_part_counts(read: Callable[[DictConfig], Callable[[int], object]]) -> None:
    one, other = OmegaConf.create(START), OmegaConf.create(START)
    other.train.lr = 0.5
    assert (read(one)(1), read(other)(1)) == (0.1, 0.5)
    assert function_fingerprint(read(one)) != function_fingerprint(read(other))


@pytest.mark.parametrize("flag", ["struct", "readonly"])
def test_flags_of_a_part_count(flag: str) -> None:
    one, other = OmegaConf.create(START), OmegaConf.create(START)
    OmegaConf.set_readonly(other, True) if flag == "readonly" else OmegaConf.set_struct(other, True)
    keys = [function_fingerprint(lambda x, cfg=cfg: x) for cfg in (one, other)]
    assert keys[0] != keys[1]
    assert len({function_fingerprint(READS["a part"][0](cfg)) for cfg in (one, other)}) == 2
    assert len({function_fingerprint(READS["both"][0](cfg)) for cfg in (one, other)}) == 1


@pytest.mark.parametrize("first", [True, False])
def test_whether_two_names_have_one_part_counts(first: bool) -> None:
    def keep_both(cfg: DictConfig, other: DictConfig) -> Callable[[int], object]:
        def write_first(x: int) -> int:
            other.n = x
            return largest(cfg.data)

        def read_first(x: int) -> int:
            result = largest(cfg.data)
            other.n = x
            return result

        return write_first if first else read_first

    one, two = OmegaConf.create(START), OmegaConf.create(START)
    assert function_fingerprint(keep_both(one, one.data)) != function_fingerprint(keep_both(one, two.data))


GLOBAL = OmegaConf.create(START)


def test_a_part_that_code_does_not_read_does_not_look_changed() -> None:
    def read(x: int) -> int:
        return x + int(GLOBAL.data.n) + int(GLOBAL.data.inner.depth)

    [binding] = [
        one for one in bindings_of([cast(types.FunctionType, read)], frozenset()) if one.name == "GLOBAL"
    ]
    GLOBAL.train.lr = 0.3
    assert not binding.is_old()
    GLOBAL.data.inner.depth = 7
    assert binding.is_old()
