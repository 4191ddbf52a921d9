"""One rule for every adapter: a value counts by its content, and randomness in it is never silent."""

from __future__ import annotations

import asyncio
import copyreg
import ctypes
import datetime as dt
import functools
import importlib
import inspect
import json
import logging
import multiprocessing
import multiprocessing.pool
import os
import queue
import subprocess
import sys
import threading
import time
import types
import uuid
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar
from zoneinfo import ZoneInfo

import filelock
import numpy as np
import pytest
import torch
from torch.utils.data import StackDataset

from castore import Store, UnhashableError, key
from castore.adapters.datasets import operator_fingerprint
from castore.adapters.embeddings.table_identity import encoder_digest
from castore.adapters.torch import dataset_key
from castore.keys import values
from castore.keys.objects import OBJECTS, function_fingerprint
from castore.keys.tracing import encode
from tests.adapters.torch.test_dataset_identity import keys_of_pairs
from tests.keys import fingerprinted

ROOT = Path(__file__).parents[2]


class Holder(list[int]):
    """A dataset and a callable that holds the given attributes."""

    def __init__(self, **held: Any) -> None:
        super().__init__([1, 2])
        self.__dict__.update(held)

    def __call__(self, sample: Any) -> Any:
        return sample


def _cached_name(held: Any) -> str:
    with Store(Path(os.environ["CASTORE_TEST_FOLDER"])) as store:

        @store.cached()
        def step(argument: Any) -> Any:
            return held, argument

        return str(step.cache_name(held))  # type: ignore[attr-defined]


#: Each adapter's key for a held object.
ADAPTERS: dict[str, Callable[[Any], str]] = {
    "cached_map": lambda held: operator_fingerprint(Holder(held=held)),
    "datasets of torch": lambda held: dataset_key(Holder(held=held)),
    "embeddings": lambda held: encoder_digest(Holder(held=held), "encoder"),
    "functions": lambda held: function_fingerprint(lambda: held),
    "store.cached": _cached_name,
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CASTORE_TEST_FOLDER", str(tmp_path / "store"))
    return tmp_path


# --- compiled code ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """The output of other processes, forked from one that has imported other people's libraries.

    It has the fingerprints of `fingerprinted.MADE` and the keys of datasets of torch, and the warnings of
    three runs of `_CASES`.
    """
    folder = tmp_path_factory.mktemp("drawn")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _ELSEWHERE, str(folder), json.dumps(_CASES), str(_PIDS)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder), "PYTHONHASHSEED": "2"},
        stdout=subprocess.PIPE, check=True, timeout=400,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def here_and_there(told_elsewhere: list[Any]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The fingerprints of `fingerprinted.MADE`: of this process, and of one that is fresh."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fingerprinted.all_fingerprints(), told_elsewhere[0][0]


def test_compiled_functions_hash_by_what_they_wrap_in_every_process(
    here_and_there: tuple[dict[str, list[str]], dict[str, list[str]]],
) -> None:
    """torch.compile keeps the id of its wrapper with a function, and numba a uuid."""
    one, other = here_and_there
    assert one.keys() == fingerprinted.MADE.keys()
    assert one == other
    assert one["numba.njit"] == one["numba.njit, used"]
    assert one["torch.jit.script of a model"] == one["torch.jit.script of a model, again"]


def test_datasets_of_torch_have_the_same_keys_in_every_process(told_elsewhere: list[Any]) -> None:
    """Neither the order of sets counts nor the way by which the dataset came there."""
    assert told_elsewhere[0][1] == keys_of_pairs()


@pytest.mark.parametrize("compiler", ["torch.compile", "numba.njit", "torch.jit.script", "numba.vectorize"])
def test_another_function_below_a_compiler_is_another_one(compiler: str) -> None:
    numba = fingerprinted.numba
    compilers: dict[str, Any] = {"torch.compile": torch.compile, "torch.jit.script": torch.jit.script}
    compile_ = compilers.get(compiler) or getattr(numba, compiler.partition(".")[2])
    functions = _plus_one, _plus_two, _again_plus_one  # names count too
    assert len({operator_fingerprint(compile_(function)) for function in functions}) == 3
    assert operator_fingerprint(compile_(_plus_one)) == operator_fingerprint(compile_(_plus_one))


_scale = 2.0


def _scaled(x: Any) -> Any:
    return x * _scale


def test_a_trace_counts_by_the_values_that_it_was_made_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: its key was that of the function, whose globals may be others by now."""
    before = fingerprinted.tracer(_scaled, torch.ones(1))
    monkeypatch.setitem(globals(), "_scale", 5.0)
    after = fingerprinted.tracer(_scaled, torch.ones(1))
    assert operator_fingerprint(before) != operator_fingerprint(after)
    assert operator_fingerprint(after) == operator_fingerprint(fingerprinted.tracer(_scaled, torch.ones(1)))


def _times(x: float) -> float:
    return x * _scale


@pytest.mark.parametrize("compiler", ["njit", "vectorize"])
def test_a_function_that_numba_has_compiled_with_other_values_is_refused(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: numba keeps the values that globals had, and the key had their present ones."""
    compile_ = getattr(fingerprinted.numba, compiler)
    compiled = compile_(_times)
    before = operator_fingerprint(compiled)
    assert compiled(3.0) == 6.0
    assert operator_fingerprint(compiled) == before
    monkeypatch.setitem(globals(), "_scale", 5.0)
    with pytest.raises(UnhashableError, match=r"'_times', which numba has compiled with other values"):
        operator_fingerprint(compiled)
    after = compile_(_times)
    assert operator_fingerprint(after) != before
    assert after(3.0) == 15.0
    monkeypatch.setitem(globals(), "_scale", 2.0)
    assert operator_fingerprint(compiled) == before


def test_functions_of_numba_that_call_each_other_are_looked_at_once_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Regression: each look at a function looked at all below it, twice: 255 looks for eight of them."""
    looks = []

    def noted(encoder: Any, dispatcher: Any) -> None:
        looks.append(dispatcher)
        return require(encoder, dispatcher)

    require = values._require_as_compiled
    monkeypatch.setattr(values, "_require_as_compiled", noted)
    names: dict[str, Any] = {"njit": fingerprinted.numba.njit}
    lines = [f"@njit\ndef f{n}(x): return {f'f{n - 1}(x)' if n else 'x'} + {n}\n" for n in range(8)]
    exec("".join(lines), names)
    assert names["f7"](1) == 29
    operator_fingerprint(names["f7"])
    assert len(looks) <= 8 * 8


def _sum_to(x: int) -> int:
    return x + (_compiled_sum_to(x - 1) if x else 0)


_compiled_sum_to: Any = None


@pytest.fixture
def compiled_sum_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives `_sum_to` its global. The import of torch's compiler takes a second, so it happens late."""
    monkeypatch.setitem(globals(), "_compiled_sum_to", torch.compile(_sum_to))


@pytest.mark.parametrize("by", ["torch", "lightning"])
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.usefixtures("folder", "compiled_sum_to")
def test_switching_torch_compile_on_changes_no_key(adapter: str, by: str) -> None:
    """Compilers leave attributes on the model itself. Lightning replaces `torch.compile` at its import."""
    compile_ = inspect.unwrap(torch.compile)
    if by == "lightning":
        compile_ = importlib.import_module("lightning.fabric.wrappers")._capture_compile_kwargs(compile_)
    for plain in (_plus_one, fingerprinted.linear(), _sum_to):
        before = ADAPTERS[adapter](plain)
        assert ADAPTERS[adapter](compile_(plain)) == before
        assert ADAPTERS[adapter](plain) == before


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.usefixtures("folder")
def test_compiling_a_model_as_torchscript_changes_no_key(adapter: str) -> None:
    """torch.jit.script leaves an attribute on the model that it compiles."""
    plain = torch.nn.Sequential(fingerprinted.linear(), torch.nn.ReLU())
    before = ADAPTERS[adapter](plain)
    torch.jit.script(plain)
    assert ADAPTERS[adapter](plain) == before


def _plus_one(x: int) -> int:
    return x + 1


def _again_plus_one(x: int) -> int:
    return x + 1


def _plus_two(x: int) -> int:
    return x + 2


def test_options_of_numba_count() -> None:
    plain, fast = fingerprinted.numba.njit, fingerprinted.numba.njit(fastmath=True)
    codes = [operator_fingerprint(compile_(_plus_one)) for compile_ in (plain, fast, fast)]
    assert codes[0] != codes[1] == codes[2]


# --- order --------------------------------------------------------------------------------------------------


def _layers(names: str) -> torch.nn.Sequential:
    kinds = {"a": torch.nn.ReLU, "b": torch.nn.Softplus, "0": torch.nn.ReLU, "1": torch.nn.Softplus}
    return torch.nn.Sequential(OrderedDict((name, kinds[name]()) for name in names))


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.usefixtures("folder")
def test_what_comes_first_counts_where_order_is_meant(adapter: str) -> None:
    told = ADAPTERS[adapter]
    assert told(_layers("ab")) == told(_layers("ab")) != told(_layers("ba")) == told(_layers("ba"))
    assert told(_layers("01")) != told(_layers("10"))
    assert told(torch.nn.ModuleDict(_layers("ab")._modules)) != told(
        torch.nn.ModuleDict(_layers("ba")._modules)
    )
    made: Any = StackDataset
    stacks = [made(**{name: [name] for name in names}) for names in ("ab", "ab", "ba")]
    assert told(stacks[0]) == told(stacks[1]) != told(stacks[2])
    pairs = [("a", 1), ("b", 2), ("c", 3)]
    assert told(OrderedDict(pairs)) == told(OrderedDict(pairs)) != told(OrderedDict(pairs[::-1]))
    assert told(OrderedDict.fromkeys([1, "a"])) != told(OrderedDict.fromkeys(["a", 1]))


class _Parts(torch.nn.Module):
    """Registers parts of each kind in some order."""

    def __init__(self, names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, torch.nn.ReLU())
            self.register_buffer(f"buffer_{name}", torch.ones(1))


class _RunsChildren(_Parts):
    @torch.no_grad()
    def forward(self, x: Any) -> Any:
        return self._run(x)

    def _run(self, x: Any) -> Any:
        for child in self.children():
            x = child(x)
        return x


class _RunsByName(_Parts):
    def forward(self, x: Any) -> Any:
        return self.get_submodule("b")(self.get_submodule("a")(x))

    def freeze(self) -> None:
        for parameter in self.parameters():
            parameter.requires_grad_(False)


_NET = _RunsByName("ab")


def _first_buffer() -> Any:
    return next(_NET.buffers())


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.usefixtures("folder")
def test_the_order_of_a_modules_parts_counts_where_code_runs_through_them(adapter: str) -> None:
    told = ADAPTERS[adapter]
    assert told(_RunsChildren("ab")) == told(_RunsChildren("ab")) != told(_RunsChildren("ba"))
    assert told(_RunsByName("ab")) == told(_RunsByName("ba"))
    scope = {**globals(), "_NET": _RunsByName("ba")}
    other = types.FunctionType(_first_buffer.__code__, scope, "_first_buffer")
    assert told(_first_buffer) != told(other)


# --- the user's classes -------------------------------------------------------------------------------------


def _class(source: str) -> Any:
    scope: dict[str, Any] = {"__name__": "users_own"}
    exec(f"import enum, queue, threading\n{source}", scope)
    return scope["held"]


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("base", ["enum.Enum", "enum.IntEnum", "enum.IntFlag", "str, enum.Enum"])
@pytest.mark.usefixtures("folder")
def test_enumerations_of_code_without_a_modules_name_count_by_their_members(adapter: str, base: str) -> None:
    def member(value: Any) -> Any:
        scope: dict[str, Any] = {}
        exec(f"import enum\nclass Label({base}):\n    CAT = {value!r}\n", scope)
        return scope["Label"].CAT

    told, (one, two) = ADAPTERS[adapter], ("1", "2") if base.startswith("str") else (1, 2)
    assert told(member(one)) == told(member(one)) != told(member(two))


_CLASSES = {
    "the code of a metaclass": (
        "class Meta(type):\n    def go(cls): return {X}\nclass Own(metaclass=Meta): pass\nheld = Own"
    ),
    "what an enumeration sets on its members": (
        "class Own(enum.Enum):\n    A = 'a', {X}\n    def __new__(cls, name, size):\n        made = "
        "object.__new__(cls)\n        made._value_, made.size = name, size\n        return made\nheld = Own.A"
    ),
    "the code of a handle's subclass": (
        "class Own(threading.local):\n    def go(self): return {X}\nheld = Own()"
    ),
    "an attribute of a handle's class": "class Own(queue.Queue):\n    big = {X}\nheld = Own()",
}


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("case", _CLASSES)
@pytest.mark.usefixtures("folder")
def test_whatever_the_users_classes_say_counts(case: str, adapter: str) -> None:
    one, same, other = (ADAPTERS[adapter](_class(_CLASSES[case].replace("{X}", x))) for x in "112")
    assert one == same != other


def test_what_an_enumeration_works_out_when_it_is_used_does_not_count() -> None:
    held = _class(
        "import functools\nclass Own(enum.Flag):\n    A = 1\n    B = 2\n"
        "    @functools.cached_property\n    def size(self): return 3\nheld = Own.A"
    )
    before = operator_fingerprint(Holder(held=held))
    assert held.size == 3
    assert ~held
    assert operator_fingerprint(Holder(held=held)) == before


def test_zones_that_agree_at_a_moment_are_not_one() -> None:
    berlin, algiers = ZoneInfo("Europe/Berlin"), ZoneInfo("Africa/Algiers")
    moment = dt.datetime(2024, 1, 15, tzinfo=berlin)
    assert moment.utcoffset() == moment.replace(tzinfo=algiers).utcoffset()
    assert key({"at": moment}) != key({"at": moment.replace(tzinfo=algiers)})
    assert len({key({"at": dt.time(1, tzinfo=zone)}) for zone in (None, berlin, algiers)}) == 3


# --- addresses and what looks random ------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_an_address_of_this_process_is_an_error_that_names_the_part(adapter: str) -> None:
    made = [adapter]  # not an object that conftest.py hides from the collector, which knows all others
    around = (
        [["text" * 99] * 99, {"deep": (1, id(made))}],
        [1, {"deep": (1, repr(test_options_of_numba_count))}],
        [1, {"deep": (1, f"model of {id(made)}")}],
        [1, {"deep": (1, hex(id(made)))}],
        [1, {"deep": (1, f"model-{id(made):X}")}],
    )
    # Each adapter looks through values in the same way.
    for held in around if adapter == "functions" else around[:2]:
        with pytest.raises(UnhashableError, match=r"\[1\]\['deep'\]\[1\]: is an address of this process"):
            ADAPTERS[adapter](held)


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_large_numbers_and_texts_with_digits_are_no_addresses(adapter: str) -> None:
    held = [
        1 << 46,
        (1 << 46) + 16,
        time.time_ns(),
        "found at 0x10",
        "0x7fffffff0000",
        "run of 20260101120000, order 140000000000000, commit 7f0000000000",
        *range(1 << 44, (1 << 44) + 99, 16),
    ]
    assert ADAPTERS[adapter](held) == ADAPTERS[adapter](list(held))


_PIDS = int(Path("/proc/sys/kernel/pid_max").read_text())
_ELSEWHERE = """
import gc, json, os, sys, tempfile, threading, time, uuid, random, warnings, datasets, torch.utils.data
datasets.disable_progress_bars()
gc.freeze()
def tell(what):
    print(json.dumps(what), flush=True)
    os._exit(0)  # to take all modules apart takes a second
class Held(list):
    def __call__(self, sample):
        return {"n": 1}
def use(folder, kind, way):
    held = Held([1, 2])
    held.part = {"deep": [None, {
        "uuid": lambda: uuid.uuid4(), "text": lambda: f"run-{uuid.uuid4()}", "hex": lambda: uuid.uuid4().hex,
        "time": time.time, "generator": lambda: random.Random(), "seeded": lambda: random.Random(7),
        "constant": lambda: "0b34c9b6-5a2c-4b1c-9d8c-0a8b8d6d2f11", "process": os.getpid,
        "folder": lambda: tempfile.mkdtemp(), "id": lambda: id(kept),
    }[kind]()]}
    rows = datasets.Dataset.from_dict({"a": [1, 2]})
    with Store(folder) as store:
        if way == "map":
            cached_map(rows, held, store=store)
        elif way == "pipeline":
            Pipeline([held], store=store).run(rows)
        elif way == "dataset":
            CachedDataset(held, store).close()
        elif way == "bilevel":
            BiLevelCachedDataset(held, "1MB", "10MB", folder).close()
        elif way == "encoder":
            CachedEncoder(held, store=store)
        elif way in ("argument", "arguments"):
            @store.cached
            def step(x):
                return 1
            for _ in range(2 if way == "arguments" else 1):
                step(held.part)
                held.part = {"deep": [None, {"uuid": uuid.uuid4}.get(kind)]}
                held.part["deep"][1] = held.part["deep"][1] and held.part["deep"][1]()
        else:
            @store.cached()
            def step(x):
                return held.part and x
            step(1), step(2)
        wait()
if pid := os.fork():
    assert os.waitpid(pid, 0)[1] == 0
else:
    from tests.adapters.torch.test_dataset_identity import keys_of_pairs
    from tests.keys import fingerprinted
    tell([fingerprinted.all_fingerprints(), keys_of_pairs()])
# A run is a process of its own too.
for run in range(3):
    # Low process ids raise no doubt: in a container they are the same in every run. Threads use ids up as
    # processes do, a thousand of which would take seconds to fork.
    used = [0]
    while not 1000 < used[-1] < int(sys.argv[3]) - 1100:
        thread = threading.Thread(target=lambda: used.append(threading.get_native_id()))
        thread.start()
        thread.join()
    while not 1000 < (pid := os.fork()) < int(sys.argv[3]) - 1000:
        if not pid:
            break
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    if pid:
        assert os.waitpid(pid, 0)[1] == 0
        continue
    while not 1000 < os.getpid() < int(sys.argv[3]) - 1000:
        time.sleep(1)  # it is killed
    from castore import Store
    from castore.adapters.datasets import Pipeline, cached_map, wait
    from castore.adapters.embeddings import CachedEncoder
    from castore.adapters.torch import BiLevelCachedDataset, CachedDataset
    # Fresh processes have their objects at other addresses.
    apart = [object() for _ in range(1000 * run)]
    kept = object()
    said = []
    for kind, way in json.loads(sys.argv[2]):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", RuntimeWarning)
            use(f"{sys.argv[1]}/{kind}-{way}", kind, way)
        said.append([str(one.message) for one in told if one.category is RuntimeWarning])
    tell(said)
os._exit(0)
"""
_RANDOM = [
    ("uuid", "map"), ("text", "pipeline"), ("hex", "dataset"), ("time", "bilevel"), ("uuid", "cached"),
    ("uuid", "encoder"),
    ("uuid", "argument"), ("id", "cached"),
    ("process", "dataset"), ("folder", "dataset"),
]  # fmt: skip
_MEANT = [("uuid", "arguments"), ("generator", "map"), ("seeded", "map"), ("constant", "map")]


_CASES = [*_RANDOM, *_MEANT]


@pytest.fixture(scope="module")
def drawn(told_elsewhere: list[Any]) -> dict[tuple[str, str], list[list[str]]]:
    """The warnings of three runs, by kind and way, each with a store of its own: a run has all of them, for
    most of its time goes into imports.
    """
    _, *runs = told_elsewhere
    assert len(runs) == 3
    return {case: [run[number] for run in runs] for number, case in enumerate(_CASES)}


@pytest.mark.parametrize(("kind", "way"), _RANDOM)
def test_the_next_run_says_which_part_is_random(
    drawn: dict[tuple[str, str], list[list[str]]], kind: str, way: str
) -> None:
    first, second, _ = drawn[kind, way]
    assert first == []
    (told,) = second
    assert "['deep'][1]" in told
    assert ": is a " in told
    assert "nothing that was kept is found again" in told


def test_arguments_of_which_one_run_has_several_are_meant(
    drawn: dict[tuple[str, str], list[list[str]]],
) -> None:
    """Ids of documents, for example: each has a result of its own, and another run has others."""
    assert drawn["uuid", "arguments"] == [[], [], []]


def test_generators_that_nobody_seeded_are_told_and_seeded_ones_are_not(
    drawn: dict[tuple[str, str], list[list[str]]],
) -> None:
    # A second seed is the normal case.
    assert [len(told) for told in drawn["generator", "map"]] == [0, 0, 1]
    assert [len(told) for told in drawn["seeded", "map"]] == [0, 0, 0]
    assert [len(told) for told in drawn["constant", "map"]] == [0, 0, 0]


def test_a_vocabulary_that_has_the_number_of_this_process_by_chance_is_not_searched_for_it() -> None:
    """Tracing its hundred thousand parts would take five times as long as its key."""
    vocabulary: dict[str, int] = {f"word {number}": number for number in range(50_000)}
    vocabulary |= {f"year {os.getpid()}": os.getpid()}
    assert not encode(OBJECTS, vocabulary, "a vocabulary").found.doubtful
    few = {f"year {os.getpid()}": 1}
    assert encode(OBJECTS, few, "a year").found.doubtful == (os.getpid() >= 1000)


_PER_PROCESS = """
import json, sys, time, uuid, warnings
from castore import Store
kept = object()
def drawn(kind, held):
    @store.cached
    def step(x):
        return kind and held and x
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        step(1)
    return [str(one.message) for one in told if one.category is RuntimeWarning]
run = int(sys.argv[2])
VALUES = {
    "hexadecimal": hex(id(kept)),
    "decimal": str(id(kept)),
    "decimal in a text": f"model {id(kept)} of us",
    "hexadecimal in a text": f"model-{id(kept):x}",
    "bytes of a uuid": uuid.uuid4().bytes,
    "nanoseconds": time.time_ns(),
    "hash of a text": 0,
    "number of a uuid": 0,
    "a seed that is edited once": 7 ** 22 if run else 5 ** 26,
    "sizes": [sys.maxsize - run, 1 << 60, -1 << 63],
    "numbers that are data": [7 ** 22 + 1000 * run + place for place in range(20)],
    "a time that is edited": f"2026010112{run}000",
    "a long number in a text": f"order 1400000000{run}0000 of ours",
    "a digest that is edited": bytes([run] * 16),
}
# One number in hundreds begins with so many zeros that it does not look random.
while VALUES["hash of a text"].bit_length() < 57:
    VALUES["hash of a text"] = hash(f"text {VALUES['hash of a text']}")
while VALUES["number of a uuid"].bit_length() < 121:
    VALUES["number of a uuid"] = uuid.uuid4().int
with Store(sys.argv[1]) as store:
    print(json.dumps({kind: drawn(kind, held) for kind, held in VALUES.items()}))
"""
#: Which run says first that a value is another one in every run.
_SAID_IN = {
    **dict.fromkeys(
        [
            "hexadecimal",
            "decimal",
            "decimal in a text",
            "hexadecimal in a text",
            "bytes of a uuid",
            "nanoseconds",
        ],
        1,
    ),
    "hash of a text": 2,
    "number of a uuid": 2,
}


def test_later_runs_say_which_addresses_in_texts_and_numbers_of_a_process_are_random(tmp_path: Path) -> None:
    for run in range(3):
        done = subprocess.run(
            [sys.executable, "-c", _PER_PROCESS, str(tmp_path / "store"), str(run)],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": str(run + 1)},
            capture_output=True, text=True, check=True, timeout=300,
        )  # fmt: skip
        told = json.loads(done.stdout)
        assert {kind for kind, said in told.items() if said} == {
            kind for kind, first in _SAID_IN.items() if first <= run
        }
        assert all("closure 'held': is a " in said[0] for said in told.values() if said)


def test_storages_of_torch_count_by_their_bytes_in_every_process(
    here_and_there: tuple[dict[str, list[str]], dict[str, list[str]]],
) -> None:
    """The bytes that pickle makes of a storage have its address in them."""
    names = ("storage of ones", "storage of zeros", "typed storage of ones")
    one, other = ([run[name] for name in names] for run in here_and_there)
    assert one == other
    assert len({told for kind in one for told in kind}) == 3 * len(one[0])


# --- registries and locks of files --------------------------------------------------------------------------


class MyLock(filelock.FileLock):
    """filelock keeps a weak dict of its locks in every class of locks."""


class Tracked:
    """Lists its objects, as a metaclass or an `__init__` of the user's does."""

    by_name: ClassVar[Any] = weakref.WeakValueDictionary()
    alive: ClassVar[Any] = weakref.WeakSet()

    def __init__(self, name: str) -> None:
        self.by_name[name] = self
        self.alive.add(self)


class Referred:
    """Can be referred to weakly."""

    def __init__(self, name: str) -> None:
        self.name = name


class Tables:
    """Holds values of others weakly."""

    of_keys: ClassVar[Any] = weakref.WeakKeyDictionary()
    of_values: ClassVar[Any] = weakref.WeakValueDictionary()
    of_members: ClassVar[Any] = weakref.WeakSet()


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_locks_of_files_count_by_their_kind(adapter: str, tmp_path: Path) -> None:
    before = ADAPTERS[adapter](filelock.FileLock(tmp_path / "one"))
    with filelock.FileLock(tmp_path / "other") as lock:
        assert ADAPTERS[adapter](lock) == before
    assert ADAPTERS[adapter](filelock.SoftFileLock(tmp_path / "one")) != before
    with MyLock(tmp_path / "one") as mine:
        held = ADAPTERS[adapter](mine)
    assert ADAPTERS[adapter](MyLock(tmp_path / "other")) == held != before


def locks(row: Any) -> Any:
    with MyLock("x"):
        return {}


def tracks(row: Any) -> Any:
    return {"n": Tracked(row).by_name}


def looks_up(row: Any) -> Any:
    return Tables.of_keys, Tables.of_values, Tables.of_members


def test_the_objects_of_a_class_in_its_weak_registries_do_not_count(tmp_path: Path) -> None:
    before = operator_fingerprint(locks), operator_fingerprint(tracks)
    alive = Tracked("one"), MyLock(tmp_path / "one", is_singleton=True)
    assert (operator_fingerprint(locks), operator_fingerprint(tracks)) == before
    del alive


@pytest.mark.parametrize("table", ["of_keys", "of_values", "of_members"])
def test_what_else_a_class_holds_weakly_counts(table: str) -> None:
    found, one, other = {operator_fingerprint(looks_up)}, Referred("one"), Referred("other")
    for held in (one, other):
        weak = getattr(Tables, table)
        if table == "of_members":
            weak.add(held)
        else:
            weak[held if table == "of_keys" else "name"] = held if table == "of_values" else 1
        found.add(operator_fingerprint(looks_up))
        weak.clear()
    assert len(found) == 3


# --- spaCy --------------------------------------------------------------------------------------------------


_SPACY = """
import sys, types
def pipeline():
    import spacy
    nlp = spacy.blank("en")
    nlp.add_pipe("sentencizer")
    return nlp
def like_it():
    # spaCy's shape: `to_bytes` of a component writes a set as a list.
    import json
    modules = {name: types.ModuleType(name) for name in ("spacy", "spacy.language", "srsly")}
    sys.modules.update(modules)
    modules["srsly"].msgpack_loads = json.loads
    class Sentencizer:
        def __init__(self):
            self.punct_chars = set("!.?;:")
        def to_bytes(self, exclude=()):
            return json.dumps({"punct_chars": list(self.punct_chars), "overwrite": False}).encode()
    class Language:
        vocab = None
        def __init__(self):
            self.components = self.pipeline = [("sentencizer", Sentencizer())]
        def to_bytes(self, exclude=()):
            return b"".join(one.to_bytes() for name, one in self.components if name not in exclude)
    modules["spacy.language"].Language = Language
    return Language()
nlp = globals()[sys.argv[1]]()
from castore.keys.objects import function_fingerprint
print(function_fingerprint(lambda row: nlp(row)))
nlp.pipeline[0][1].punct_chars.discard("!")
print(function_fingerprint(lambda row: nlp(row)))
if callable(nlp):
    document = nlp("Words of a document, in a set.")
    print(function_fingerprint(lambda row: document))
"""


@pytest.mark.parametrize("kind", ["pipeline", "like_it"])
def test_a_sentencizer_and_a_document_of_spacy_count_alike_in_every_process(kind: str) -> None:
    if kind == "pipeline":
        pytest.importorskip("spacy")
    told = [
        subprocess.check_output(
            [sys.executable, "-c", _SPACY, kind],
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).split()
        for seed in ("1", "2", "3")
    ]
    assert told[0] == told[1] == told[2]
    assert told[0][0] != told[0][1]


# --- pickle's protocol --------------------------------------------------------------------------------------


class Opaque:
    """Its way to be pickled is registered elsewhere."""

    def __init__(self, size: int) -> None:
        self.handle = lambda: iter("")
        self.size = size

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("cannot pickle this")


class Set:
    """Has a state setter: the sixth item of a pickle's reduce value, which no other item contains."""

    def __init__(self, setter: Any = None) -> None:
        self.setter = setter

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Set, (), {"a": 1}, None, None, self.setter


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_what_copyreg_knows_counts_by_that(adapter: str) -> None:
    with pytest.raises(UnhashableError, match="cannot pickle this"):
        ADAPTERS[adapter](Opaque(1))
    copyreg.pickle(Opaque, lambda value: (Opaque, (value.size,)))
    try:
        codes = [ADAPTERS[adapter](Opaque(size)) for size in (1, 1, 2)]
    finally:
        del copyreg.dispatch_table[Opaque]
    assert codes[0] == codes[1] != codes[2]


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_state_setters_count(adapter: str) -> None:
    codes = [ADAPTERS[adapter](Set(setter)) for setter in (None, _plus_one, _plus_one, _plus_two)]
    assert codes[1] == codes[2]
    assert len(set(codes)) == 3


class Named:
    """Has the name of something else."""

    def __reduce__(self) -> str:
        return "ROOT"


def test_an_object_that_goes_by_anothers_name_is_refused() -> None:
    with pytest.raises(UnhashableError, match="calls itself 'ROOT'"):
        operator_fingerprint(Holder(held=Named()))


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_archives_of_arrays_count_by_their_arrays(adapter: str, folder: Path) -> None:
    codes = []
    for number, array in enumerate((np.arange(3), np.arange(3), np.arange(4))):
        np.savez(folder / f"{number}.npz", array=array, other=np.ones(2))
        with np.load(folder / f"{number}.npz") as archive:
            codes.append(ADAPTERS[adapter](archive))
    assert codes[0] == codes[1] != codes[2]
    with pytest.raises(UnhashableError, match="closed"):
        ADAPTERS[adapter](archive)


def test_tensors_of_odd_layouts_count_by_their_values() -> None:
    """One number that a view left with a stride, and sparse ones."""
    assert operator_fingerprint(torch.tensor([1j]).conj().imag) == operator_fingerprint(torch.tensor([-1.0]))
    assert operator_fingerprint(torch.eye(2).to_sparse()) != operator_fingerprint(
        (torch.eye(2) * 2).to_sparse()
    )


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_masks_of_arrays_count(adapter: str) -> None:
    masks = [False, False, True], [False, False, True], [False, True, False]
    codes = [ADAPTERS[adapter](np.ma.array([1, 2, 3], mask=mask)) for mask in masks]
    assert codes[0] == codes[1] != codes[2]


# --- handles ------------------------------------------------------------------------------------------------


def counted(value: Any) -> Any:
    value.value += 1
    return value


def filled(pool: Any) -> Any:
    pool.put(1)
    return pool


_SPAWN = multiprocessing.get_context("spawn")
#: The way to make a handle, and the way to use it: neither may make a difference.
HANDLES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "Lock": (threading.Lock, lambda lock: lock.acquire()),
    "RLock": (threading.RLock, lambda lock: lock.acquire()),
    "Condition": (threading.Condition, lambda lock: lock.acquire()),
    "Event": (threading.Event, lambda event: event.set()),
    "Semaphore": (lambda: threading.Semaphore(3), lambda lock: lock.acquire()),
    "local": (threading.local, lambda local: setattr(local, "x", 1)),
    "Thread": (lambda: threading.Thread(target=len), lambda thread: setattr(thread, "name", "x")),
    "ThreadPoolExecutor": (lambda: ThreadPoolExecutor(1), lambda pool: pool.submit(len, "").result()),
    "queue.Queue": (queue.Queue, filled),
    "SimpleQueue": (queue.SimpleQueue, filled),
    "logger": (lambda: logging.getLogger("castore.test"), lambda log: log.debug("x")),
    "handler": (logging.NullHandler, lambda handler: handler.setLevel(10)),
    "asyncio.Lock": (asyncio.Lock, lambda lock: None),
    "mp.Lock": (_SPAWN.Lock, lambda lock: lock.acquire()),
    "mp.RLock": (_SPAWN.RLock, lambda lock: lock.acquire()),
    "mp.Semaphore": (lambda: _SPAWN.Semaphore(2), lambda lock: lock.acquire()),
    "mp.Event": (_SPAWN.Event, lambda event: event.set()),
    "mp.Condition": (_SPAWN.Condition, lambda lock: lock.acquire()),
    "mp.Value": (lambda: _SPAWN.Value("l", 0), counted),
    "mp.Array": (lambda: _SPAWN.Array("l", 3), lambda array: array.__setitem__(0, 5)),
    "mp.RawValue": (lambda: _SPAWN.RawValue("l", 0), counted),
    "mp.RawArray": (lambda: _SPAWN.RawArray("l", 3), lambda array: array.__setitem__(0, 5)),
    "mp.Queue": (_SPAWN.Queue, lambda pipe: None),
    "mp.SimpleQueue": (_SPAWN.SimpleQueue, filled),
    "mp.Pipe": (lambda: _SPAWN.Pipe()[0], lambda end: end.fileno()),
    "mp.pool": (lambda: multiprocessing.pool.ThreadPool(1), lambda pool: pool.map(len, [""])),
}


@pytest.mark.parametrize("kind", HANDLES)
def test_handles_count_by_their_kind_in_every_adapter(kind: str) -> None:
    make, use = HANDLES[kind]
    one, other = make(), make()
    try:
        before = {adapter: ask(one) for adapter, ask in ADAPTERS.items()}
        use(other)
        assert {adapter: ask(other) for adapter, ask in ADAPTERS.items()} == before
        assert all(before[adapter] != ask(None) for adapter, ask in ADAPTERS.items())
    finally:
        for made in (one, other):
            for end in ("shutdown", "terminate", "close"):
                if hasattr(made, end) and not isinstance(made, logging.Handler):
                    getattr(made, end)()
                    break


def test_plain_ctypes_count_by_their_values() -> None:
    assert operator_fingerprint(Holder(held=ctypes.c_long(1))) != operator_fingerprint(
        Holder(held=ctypes.c_long(2))
    )


@pytest.mark.parametrize("adapter", ["datasets of torch", "embeddings"])
@pytest.mark.parametrize(
    "make", [__import__("random").Random, np.random.RandomState, np.random.default_rng, torch.Generator]
)
def test_random_generators_are_named_as_what_they_are(adapter: str, make: Callable[[], Any]) -> None:
    """MONAI's Compose holds a RandomState, boto3's retries random.random."""
    with pytest.raises(UnhashableError, match=r"transform\.R: is a random generator, .*__getstate__"):
        ADAPTERS[adapter](Holder(transform=Holder(R=make())))


# --- models -------------------------------------------------------------------------------------------------


class Encoder(torch.nn.Module):
    """Sets itself to eval before it answers, as sentence_transformers do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))

    def forward(self, x: Any) -> Any:
        return self.inner(x)

    def encode(self, x: Any) -> Any:
        self.eval()
        return self(x)


MODEL = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))


def embed(x: Any) -> Any:
    return MODEL.eval()(x)


def embed_as_it_is(x: Any) -> Any:
    return MODEL(x)


class Operator:
    """Loads nothing, and sets its model to eval where it uses it."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Dropout(0.5)

    def process(self, x: Any) -> Any:
        self.model.eval()
        return self.model(x)


def test_a_model_is_the_same_before_and_after_the_use_that_sets_it_to_eval() -> None:
    x = torch.ones(1, 2)
    model, operator = Encoder(), Operator()
    used: list[tuple[Any, Callable[[], Any]]] = [
        (Holder(model=model), lambda: model.encode(x)),
        (operator.process, lambda: operator.process(x)),
        (embed, lambda: embed(x)),
    ]
    for ask in (operator_fingerprint, function_fingerprint):
        for made, use in used:
            for module in (model, operator.model, MODEL):
                module.train()
            before = ask(made)
            use()
            assert ask(made) == before


class Bare(torch.nn.Module):
    """Has no method that sets it to eval."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.5))

    def forward(self, x: Any) -> Any:
        return self.inner(x)


class ReadInside(Bare):
    """An inner function reads ``self`` too, as in sentence_transformers."""

    def encode(self, x: Any) -> Any:
        self.eval()
        return [self(row) for row in x]


class UnderNoGrad(Bare):
    @torch.no_grad()
    def encode(self, x: Any) -> Any:
        self.eval()
        return self(x)


class UnderInferenceMode(Bare):
    @torch.inference_mode()
    @functools.lru_cache  # noqa: B019 - the test's objects are few
    def encode(self, x: Any) -> Any:
        self.eval()
        return self(x)


class KeepsOne:
    """No module itself."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Dropout(0.5)

    @torch.no_grad()
    def encode(self, x: Any) -> Any:
        return self.model.eval()(x)


@pytest.mark.parametrize("kind", [ReadInside, UnderNoGrad, UnderInferenceMode, KeepsOne])
def test_a_model_is_the_same_before_and_after_a_method_behind_a_wrapper_sets_it_to_eval(kind: Any) -> None:
    made = kind()

    def uses(x: Any) -> Any:
        return made.encode(x)

    for ask in (operator_fingerprint, function_fingerprint):
        for module in (made, *vars(made).values()):
            if isinstance(module, torch.nn.Module):
                module.train()
        before = ask(uses)
        uses(torch.ones(1, 2))
        assert ask(uses) == before


@pytest.mark.parametrize("name", ["KDTree", "BallTree"])
def test_a_tree_that_was_asked_is_the_same(name: str) -> None:
    kind = getattr(pytest.importorskip("sklearn.neighbors"), name)
    points = np.random.default_rng(0).random((50, 3))
    tree, other = kind(points), kind(points[::-1])
    before = function_fingerprint(tree.query)
    tree.query(points[:3])
    assert function_fingerprint(tree.query) == before
    assert function_fingerprint(other.query) != before


@pytest.mark.parametrize("form", ["csr", "csc", "bsr", "coo", "dia", "lil", "dok"])
def test_a_sparse_matrix_that_was_asked_is_the_same(form: str) -> None:
    sparse = pytest.importorskip("scipy.sparse")
    matrices = [
        getattr(sparse, f"{form}_{what}")(np.diag(values))
        for what in ("array", "matrix") for values in ([1.0, 0, 2], [1.0, 0, 3], [1, 0, 2])
    ]  # fmt: skip

    def keys() -> list[str]:
        return [function_fingerprint(functools.partial(len, matrix)) for matrix in matrices]

    before = keys()
    assert len({*before}) == len(matrices)
    for matrix in matrices:
        _ = getattr(matrix, "has_sorted_indices", None), getattr(matrix, "has_canonical_format", None)
        _ = matrix @ np.ones(3)
    assert keys() == before


def test_what_is_another_in_each_process_without_a_meaning_does_not_count() -> None:
    """A hash of a text in configs of transformers, and NumPy's own generator in distributions of scipy."""
    pytest.importorskip("transformers")
    told = []
    for seed in ("1", "2"):
        program = (
            "import torch, transformers; from scipy.stats import norm, gamma\n"
            "from castore.keys.objects import function_fingerprint\n"
            "config = transformers.GPT2Config("
            "vocab_size=50, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=1, eos_token_id=1)\n"
            "torch.manual_seed(0); model = transformers.GPT2LMHeadModel(config)\n"
            f"import numpy; numpy.random.seed({seed})\n"
            "print(function_fingerprint(lambda x: model(x)), function_fingerprint(lambda x: norm.cdf(x)))"
        )
        found = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        told.append(found.stdout)
    assert told[0] == told[1]


def test_the_mode_of_a_model_that_nobody_sets_counts() -> None:
    """Batch normalisation and dropout answer differently: results made by mistake must not come back."""
    codes = [operator_fingerprint(embed_as_it_is) for mode in (True, False) if MODEL.train(mode)]
    assert codes[0] != codes[1]


# --- store.cached -------------------------------------------------------------------------------------------


def test_cached_functions_take_what_save_and_cached_map_take(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    rules = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    rules.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model, calls = torch.nn.Linear(2, 2), []
    with Store(tmp_path / "results") as store:

        @store.cached()
        def step(argument: Any) -> Any:
            calls.append(1)
            return len(rules.encode("a b").ids) + sum(1 for _ in model.parameters())

        calls = []  # it appends to a global of its own, which counts by its content
        names = set()
        arguments: list[Any] = [
            torch.ones(2), torch.zeros(2), torch.float16, torch.device("cpu"), model, rules, np.dtype("f4"),
            len, Holder(a=1),
            {"deep": [torch.ones(3)]}, torch.nn.Linear, uuid.UUID(int=3),
        ]  # fmt: skip
        for argument in arguments:
            names.add(step.cache_name(argument))  # type: ignore[attr-defined]
            assert step.cache_name(argument) in names  # type: ignore[attr-defined]
        assert len(names) == len(arguments)
        assert step(torch.ones(2)) == 4


def test_hooks_of_tensors_count_and_so_does_the_order_of_those_of_modules() -> None:
    def of_tensor(method: str, hook: Any) -> str:
        tensor = torch.nn.Parameter(torch.ones(2))
        getattr(tensor, method)(hook)
        return function_fingerprint(lambda: tensor)

    for method in ("register_hook", "register_post_accumulate_grad_hook"):
        found = [of_tensor(method, hook) for hook in (lambda grad: grad * 2, lambda grad: grad * 3)]
        assert len({*found, function_fingerprint(lambda: torch.nn.Parameter(torch.ones(2)))}) == 3

    def of_module(prepend: bool) -> str:
        layer = fingerprinted.linear()
        layer.register_forward_hook(lambda module, given, found: found * 2)
        layer.register_forward_hook(lambda module, given, found: found + 1, prepend=prepend)
        return function_fingerprint(lambda: layer)

    assert len({of_module(False), of_module(True)}) == 2


def test_an_operator_of_torch_counts_by_its_functions_whether_it_ran_or_not() -> None:
    """Regression: the first call changed its key, for torch adds to its wrappers then."""

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    make: Any = torch.library.custom_op
    one, other = (make(f"castore_tests::{f.__name__}", f, mutates_args=()) for f in (double, triple))
    before = function_fingerprint(one)
    assert one(torch.ones(1)) == 2
    assert function_fingerprint(one) == before != function_fingerprint(other)
    one.register_kernel("cuda")(triple)
    with_kernel = function_fingerprint(one)
    one.register_kernel("cuda")(double)
    assert len({before, with_kernel, function_fingerprint(one)}) == 3
