"""Frames of pandas, and SciPy's matrices: kept exactly, refused with a way out, or corrupt."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import pandas as of_pandas

from castore import SerializationError, Store
from castore.adapters.torch.samples import pack, unpack
from castore.serialize.serializers import dump, load
from tests.serialize.kinds.frames import COLUMNS, FRAMES, same_frames


def saved(value: Any) -> Any:
    name, data = dump(value)
    return load(data, name)


@pytest.mark.parametrize(
    "place", range(len(FRAMES)), ids=lambda place: f"{place}-{type(FRAMES[place]).__name__}"
)
def test_it_comes_back_in_every_part(place: int) -> None:
    value = FRAMES[place]
    assert same_frames(saved(value), value)
    assert same_frames(saved([{"x": value}])[0]["x"], value)
    assert same_frames(unpack(pack(value)), value)
    assert dump(saved(value)) == dump(value)


_CELLS = {
    "int64": st.integers(-(2**63), 2**63 - 1), "float32": st.floats(width=32), "bool": st.booleans(),
    "object": st.none() | st.floats() | st.integers() | st.text(max_size=3) | st.lists(st.booleans()),
    "datetime64[ns]": None, "complex128": None, "str": st.text(max_size=3) | st.none(),
}  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_frame_comes_back(data: Any) -> None:
    kinds = data.draw(st.lists(st.sampled_from(sorted(_CELLS)), max_size=4))
    columns = [
        of_pandas.column(f"c{place}", dtype=kind, elements=_CELLS[kind]) for place, kind in enumerate(kinds)
    ]
    index = data.draw(
        st.sampled_from([of_pandas.range_indexes(max_size=5), of_pandas.indexes(dtype=int, max_size=5)])
    )
    frame = data.draw(of_pandas.data_frames(columns, index=index))
    assert same_frames(saved(frame), frame)


def test_a_frame_that_comes_back_can_be_written_to(store: Store) -> None:
    store.save("x", pd.DataFrame(COLUMNS))
    frame, again = store.load("x"), store.load("x")
    frame.loc[0, "whole"], frame.loc[0, "objects"] = 7, "seven"
    frame["float"] += 1
    assert (again["whole"][0], again["objects"][0]) == (0, "a")


def test_cached_functions_give_frames(store: Store, tmp_path: Path) -> None:
    log = str(tmp_path / "runs")

    @store.cached
    def features(count: int) -> Any:
        with open(log, "a") as file:
            file.write("x")
        return {
            "frame": pd.DataFrame({"x": range(count), "y": ["a"] * count}),
            "sparse": scipy.sparse.eye_array(3),
        }

    first, second = features(3), features(3)
    assert Path(log).read_text() == "x"
    assert same_frames(first["frame"], second["frame"])
    assert same_frames(first["sparse"], second["sparse"])


REFUSED: list[tuple[Any, str, str]] = [
    (pd.DataFrame({"x": pd.arrays.SparseArray([0, 1])}), "['x'].array", "to_dense()"),
    (pd.Series(pd.arrays.SparseArray([0, 1])), ".array", "to_dense()"),
    (pd.DataFrame({"x": pd.Series([1, iter([])], dtype=object)}), "['x'].iloc[1]", "list(...)"),
    (pd.DataFrame({"x": [1]}, index=pd.Index([iter([])], dtype=object)), ".index[0]", "list(...)"),
    (pd.DataFrame({iter([]): [1]}), ".columns[0]", "list(...)"),
    (pd.Series([1], name=("a", iter([]))), ".name[1]", "list(...)"),
    (
        pd.DataFrame([[1]], index=pd.MultiIndex.from_tuples([(1, iter([]))])),
        ".index.levels[1][0]", "list(...)",
    ),
    (pl.DataFrame({"x": [1]}), "", "to_arrow()"),
    (pl.Series([1]), "", "to_frame().to_arrow()"),
    (pl.DataFrame({"x": [1]}).lazy(), "", "collect().to_arrow()"),
    (
        pa.table({"d": pa.DictionaryArray.from_arrays(pa.array([0]), pa.array(["x"]).dictionary_encode())}),
        "", "column 'd' has a dictionary of dictionary values",
    ),
    (scipy.sparse.lil_array((2, 2)), "", "tocsr()"),
    (scipy.sparse.dok_matrix((2, 2)), "", "tocsr()"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "step", "advice"), REFUSED, ids=lambda part: part if type(part) is str else ""
)
def test_what_is_refused_names_the_part_and_a_way_out(value: Any, step: str, advice: str) -> None:
    for give, start in ((dump, "value"), (pack, "sample")):
        with pytest.raises(SerializationError) as caught:
            give({"v": [value]})
        assert str(caught.value).startswith(f"{start}['v'][0]{step}: ")
        assert advice in str(caught.value)


def test_what_pandas_has_broken_is_refused_when_it_is_kept() -> None:
    frame = pd.DataFrame({"a": ["p", "p"], "v": [1, 2]}).set_flags(allows_duplicate_labels=False)
    with pytest.raises(SerializationError, match=r"label twice.*set_flags\(allows_duplicate_labels=True\)"):
        dump(frame.set_index("a"))
    index = pd.MultiIndex([[1], [2]], [[0, 0], [0]], verify_integrity=False)
    with pytest.raises(SerializationError, match="codes of different numbers; make it anew"):
        dump(index)
    index = pd.MultiIndex([[1]], [[7]], verify_integrity=False)
    with pytest.raises(SerializationError, match="a code is that of no level; make it anew"):
        dump(index)
    matrix = scipy.sparse.csr_array((2, 2))
    matrix.note = "mine"
    with pytest.raises(SerializationError, match="has the attribute note, which would be lost"):
        dump(matrix)


def test_sums_of_a_result_and_the_kept_one_find_missing_labels(store: Store) -> None:
    frame = pd.DataFrame({"a": ["x", None], "b": [1, 2], "v": [1, 2]})
    first = frame.groupby(["a", "b"], dropna=False)["v"].sum()
    store.save("x", first)
    assert (first + store.load("x")).tolist() == [2, 4]


def test_a_hundred_thousand_columns_take_as_long_as_their_bytes(store: Store) -> None:
    frame = pd.DataFrame(np.random.default_rng(0).random((10, 100_000)))
    began = time.process_time()
    store.save("x", frame)
    assert same_frames(store.load("x").iloc[:, ::5000], frame.iloc[:, ::5000])
    assert time.process_time() - began < 2


class Own(pd.DataFrame):  # type: ignore[misc]
    """A subclass may hold more than its columns."""


def test_a_subclass_is_refused() -> None:
    with pytest.raises(SerializationError, match=r"Own.*pandas\.DataFrame\(\.\.\.\)"):
        dump(Own({"x": [1]}))


_WITHOUT = """
import sys
sys.modules["{module}"] = None
import castore
from castore.serialize.serializers import load
try:
    load(open({path!r}, "rb").read(), "msgpack")
except castore.MissingDependencyError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("value", "module", "package"),
    [
        (pd.DataFrame({"x": [1]}), "pandas", '"castore[datasets]"'),
        (scipy.sparse.csr_array((2, 2)), "scipy", "scipy"),
    ],
    ids=["pandas", "scipy"],
)
def test_a_process_without_the_library_says_what_to_install(
    value: Any, module: str, package: str, tmp_path: Path
) -> None:
    (tmp_path / "value").write_bytes(dump(value)[1])
    script = _WITHOUT.format(module=module, path=str(tmp_path / "value"))
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout == f"this needs the package {module}; install it with: pip install {package}\n"


def test_room_behind_the_entries_is_left_out() -> None:
    matrix = scipy.sparse.csr_array(np.eye(3))
    matrix.data, matrix.indices = np.append(matrix.data, 9.0), np.append(matrix.indices, 0)
    again = saved(saved(matrix))
    assert (len(again.data), len(again.indices), (again != matrix).nnz) == (3, 3, 0)


def test_indices_keep_their_width() -> None:
    diagonal = scipy.sparse.dia_array(np.eye(3))
    diagonal.offsets = diagonal.offsets.astype("i8")
    assert saved(diagonal).offsets.dtype == np.dtype("i8")
    matrix = scipy.sparse.csr_array(np.eye(3))
    matrix.indices, matrix.indptr = matrix.indices.astype("i8"), matrix.indptr.astype("i8")
    assert saved(matrix).indices.dtype == saved(matrix).indptr.dtype == np.dtype("i8")
