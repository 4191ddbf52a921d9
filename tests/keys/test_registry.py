"""How a type is registered: by name or by type, in tables and rules of which the first that fits counts."""

from __future__ import annotations

import collections
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from castore import UnhashableError
from castore.keys.encoder import CONFIGS, Encoder
from castore.keys.functions import orders
from castore.keys.objects import OBJECTS
from castore.keys.registry import Rules, Table
from castore.keys.tracing import encode


class Sensor:
    def __init__(self, name: str, reads: int = 0) -> None:
        self.name, self.reads = name, reads


class Thermometer(Sensor):
    pass


def _by_name(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield from ("sensor", encoder.part(value.name, ".name"))


def _by_reads(encoder: Encoder, value: Any) -> Iterator[Any]:
    yield from ("sensor", value.reads)


def _code(value: Any, *rules: Any) -> bytes:
    return encode(Rules(*rules, OBJECTS, orders=orders), value, "value").code


@pytest.mark.parametrize("kind", [Sensor, Thermometer])
@pytest.mark.parametrize(
    "table", [Table([(__name__, ("Sensor",), _by_name)]), Table(types={Sensor: _by_name})]
)
def test_a_registered_type_and_its_subclasses_count_by_what_its_function_yields(
    kind: Any, table: Table
) -> None:
    assert _code(kind("a", 1), table) == _code(kind("a", 2), table) != _code(kind("b", 1), table)
    assert _code(kind("a", 1)) != _code(kind("a", 2))  # by its state, without the table


def test_the_first_row_that_fits_counts() -> None:
    rows = [(__name__, ("Thermometer",), _by_reads), (__name__, ("Sensor",), _by_name)]
    table = Table(rows)
    assert table.of(Thermometer) is _by_reads
    assert table.of(Sensor) is _by_name
    assert Table(reversed(rows)).of(Thermometer) is _by_name
    assert Table(rows, types={Sensor: _by_name}).of(Thermometer) is _by_name


def test_a_type_that_is_registered_by_name_costs_no_import() -> None:
    assert "turtle" not in sys.modules
    assert Table([("turtle", ("Turtle",), _by_name), ("no.such.module", ("X",), _by_name)]).of(Sensor) is None
    assert "turtle" not in sys.modules


def test_a_row_may_be_added_by_a_module_that_builds_on_the_table() -> None:
    table = Table()
    table.add(__name__, ("Sensor",), _by_name)
    assert table.of(Thermometer) is _by_name


def test_a_rule_that_returns_none_leaves_a_value_to_the_next_rule() -> None:
    asked: list[Any] = []

    def passes(encoder: Encoder, value: Any) -> None:
        asked.append(type(value))

    assert _code([Sensor("a")], passes) == _code([Sensor("a")])
    assert Sensor in asked
    assert list not in asked  # a plain container needs no rule


def test_what_no_rule_takes_is_an_error_that_names_it() -> None:
    with pytest.raises(UnhashableError, match=r"value\['a'\]: cannot hash <class '.*Sensor'>"):
        Encoder(CONFIGS).encode({"a": Sensor("a")}, "value")
    with pytest.raises(UnhashableError, match=r"value\[0\]: cannot hash <class 'dict_keys'>"):
        encode(Rules(Table(), orders=orders), [{}.keys()], "value")


def test_a_rule_that_comes_first_sees_values_that_are_leaves_and_containers() -> None:
    def loud(encoder: Encoder, value: str, step: str) -> bytes | None:
        return encoder.tagged("loud", value.lower()) if value.isupper() else None

    rules = Rules(OBJECTS, orders=orders, first={str: loud})
    codes = {text: encode(rules, {"k": text}, "value").code for text in ("ONE", "one")}
    assert codes["ONE"] != codes["one"] == encode(OBJECTS, {"k": "one"}, "value").code


def test_the_order_of_keys_counts_where_the_rules_say_so() -> None:
    one, two = {"a": 1, "b": 2}, {"b": 2, "a": 1}
    assert Encoder(CONFIGS).encode(one, "") == Encoder(CONFIGS).encode(two, "")
    assert _code(one) != _code(two)
    never = Rules(OBJECTS, orders=lambda value, around: False)
    held = [types.SimpleNamespace(inner=inner) for inner in (one, two)]
    assert _code(held[0]) != _code(held[1])
    assert encode(never, held[0], "").code == encode(never, held[1], "").code


def test_attributes_that_the_rules_leave_out_do_not_count() -> None:
    rules = Rules(OBJECTS, orders=orders, left_out=frozenset({"reads"}))
    assert encode(rules, Sensor("a", 1), "").code == encode(rules, Sensor("a", 2), "").code
    assert encode(rules, Sensor("a", 1), "").code != encode(rules, Sensor("b", 1), "").code


def test_what_rules_remember_ends_with_the_encoder_and_a_sets_elements_begin_anew() -> None:
    made: list[collections.Counter[str]] = []

    def memory() -> collections.Counter[str]:
        made.append(collections.Counter())
        return made[-1]

    def counts(encoder: Encoder, value: Any) -> None:
        encoder.memory[type(value).__name__] += 1

    rules = Rules(counts, OBJECTS, orders=orders, memory=memory)
    encode(rules, [Sensor("a"), {(Sensor("b"),)}], "")
    assert [each["Sensor"] for each in made] == [1, 1]
