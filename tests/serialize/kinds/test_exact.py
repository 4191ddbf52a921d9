"""Numbers of torch, NumPy and ml_dtypes, bytes and images: every place returns each exactly, or refuses it.

A returned value has the same type and bits. If one place refuses a value, every place does, with a way out
that works.
"""

from __future__ import annotations

import array
import io
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pandas
import pyarrow as pa
import pytest
import torch
from PIL import Image

from castore import SerializationError, Store
from castore.adapters.torch import CachedDataset
from castore.adapters.torch.samples import pack, unpack
from castore.adapters.tree import TreeCacheManager
from castore.serialize.serializers import dump, load
from tests.adapters.torch.test_samples import DTYPES, images, same, tensor_of


def saved(value: Any) -> Any:
    name, data = dump(value)
    return load(data, name)


#: Each puts a value into one place and returns it from there.
WAYS: dict[str, Callable[[Any], Any]] = {
    "save": saved,
    "save, inside": lambda value: saved({"x": [1, (value, {"y": None})]})["x"][1][0],
    "sample": lambda value: unpack(pack(value)),
    "sample, inside": lambda value: unpack(pack({"x": [1, (value, {"y": None})]}))["x"][1][0],
}


def returns(value: Any) -> None:
    """Check that all ways give the value back."""
    for way, through in WAYS.items():
        assert same(through(value), value), way


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_every_dtype_and_layout_come_back_bit_for_bit(dtype: torch.dtype) -> None:
    for shape in [(), (0,), (3, 0, 2), (3, 5)]:
        returns(tensor_of(dtype, *shape))
    whole = tensor_of(dtype, 4, 6)
    for value in (whole.T, whole[1:, ::2], whole[0, 1], whole[1].expand(2, 6)):
        # The bits of a value that is not in one piece are compared through a copy.
        for way, through in WAYS.items():
            back = through(value)
            assert (back.dtype, back.shape) == (value.dtype, value.shape), way
            assert bits_of(back) == bits_of(value), way
    named = {"a": tensor_of(dtype, 2), "b": tensor_of(torch.float32, 3), "c": tensor_of(dtype)}
    assert same(saved(named), named)


def bits_of(value: torch.Tensor) -> list[Any]:
    """The bits, of tensors that support no operation but a view too."""
    like = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(value.element_size())
    return (torch.view_as_real(value).view(torch.int64) if like is None else value.view(like)).tolist()


def numpy_types() -> list[np.dtype[Any]]:
    plain = [np.dtype(char) for char in "?bBhHiIlLqQefdFD"]
    swapped = [dtype.newbyteorder() for dtype in plain if dtype.itemsize > 1]
    units = ["Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as", "25s"]
    times = [np.dtype(f"{kind}8[{unit}]") for kind in "mM" for unit in units] + [np.dtype("m8")]
    others = [np.dtype("S3"), np.dtype("U2"), np.dtype("V5"), np.dtype([("a", "i1"), ("b", ">f8")])]
    named = {name for name in vars(ml_dtypes) if name.startswith(("bfloat", "float", "int", "uint"))}
    return [
        *plain,
        *swapped,
        *times,
        *others,
        *(np.dtype(getattr(ml_dtypes, name)) for name in sorted(named)),
    ]


def array_of(dtype: np.dtype[Any], *shape: int) -> np.ndarray[Any, Any]:
    """Random bits, for types in which all bits are a value."""
    count = max(math.prod(shape), 1) * dtype.itemsize
    most = {"b": 2, "U": 1}.get(dtype.kind, 16 if dtype.type.__module__ == "ml_dtypes" else 256)
    data = np.random.default_rng(0).integers(0, most, count, "u1").tobytes()
    made: np.ndarray[Any, Any] = np.frombuffer(data, dtype)[: math.prod(shape)].reshape(shape).copy()
    return made


@pytest.mark.parametrize("dtype", numpy_types(), ids=lambda dtype: f"{dtype.str} {dtype}")
def test_arrays_and_scalars_of_every_dtype_come_back_bit_for_bit(dtype: np.dtype[Any]) -> None:
    whole = array_of(dtype, 4, 6)
    for value in (whole, whole[1:, ::2], np.asfortranarray(whole), array_of(dtype), array_of(dtype, 0, 2)):
        returns(value)
    scalar = whole[0, 0]
    if type(scalar) in (np.longlong, np.ulonglong):  # NumPy writes it as `int64`
        for through in WAYS.values():
            with pytest.raises(SerializationError, match=r"longlong.*convert it with item\(\)"):
                through(scalar)
        scalar = scalar.item()
    returns(scalar)


@pytest.mark.parametrize(
    "value",
    [bytearray(), bytearray(b"\0\xff"), [bytearray(b"x"), b"x"], {"a": {"b": (bytearray(b"y"), 1)}},
    np.str_("a\0"), np.bytes_(b"a\0")],
    ids=repr,
)  # fmt: skip
def test_bytes_come_back_as_what_they_were(value: Any) -> None:
    returns(value)


@pytest.mark.parametrize(
    "value",
    [
        pandas.Timestamp(1), pandas.Timestamp("1200-01-01"), pandas.Timestamp(5, unit="s", tz="UTC"),
        *(pandas.Timestamp("2024-10-27 02:30").tz_localize("Europe/Berlin", ambiguous=first)
          for first in (True, False)),
        pandas.Timedelta(7), pandas.Timedelta("3D").as_unit("s"),
    ],
    ids=repr,
)  # fmt: skip
def test_times_of_pandas_come_back_with_unit_zone_and_fold(value: Any) -> None:
    for way, through in WAYS.items():
        back = through(value)
        assert (type(back), back, back.unit) == (type(value), value, value.unit), way
        assert getattr(back, "fold", 0) == getattr(value, "fold", 0), way
        assert getattr(back, "tzinfo", None) == getattr(value, "tzinfo", None), way
    assert saved([pandas.NaT]) == [pandas.NaT]


def grads() -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warning that compressed layouts are new
        return {
            "floats": torch.ones(2, requires_grad=True),
            "halves": torch.ones(2, dtype=torch.bfloat16, requires_grad=True),
            "coordinates": torch.eye(2).to_sparse().requires_grad_(),
            "rows": torch.eye(2).to_sparse_csr().requires_grad_(),
        }


@pytest.mark.parametrize("name", grads())
def test_a_tensor_that_requires_grad_comes_back_requiring_it_from_every_place(name: str) -> None:
    value = grads()[name]
    for way, through in WAYS.items():
        back = through(value)
        assert back.requires_grad, way
        assert back.is_leaf, way
        assert (back.dtype, back.layout) == (value.dtype, value.layout), way
        assert torch.equal(back.detach().to_dense(), value.detach().to_dense()), way


def test_a_tensor_with_a_graph_is_saved_without_it_and_is_no_sample() -> None:
    """A sample that lost its graph would train less than the dataset's own, and nobody would see it."""
    value = {"x": torch.ones(2, requires_grad=True) * 2}
    assert saved(value)["x"].requires_grad
    with pytest.raises(SerializationError, match=r"sample\['x'\]: .*graph.*detach\(\)"):
        pack(value)


ODD: dict[str, Callable[[], Any]] = {
    "more dimensions than NumPy has": lambda: tensor_of(torch.int16, *[1] * 70, 3),
    "zeros without memory": lambda: vars(torch)["_efficientzerotensor"](3),
    "a view of the imaginary half": lambda: torch.tensor([1 + 2j]).conj().imag,
}


@pytest.mark.parametrize("name", ODD)
def test_tensors_without_plain_elements_of_their_own_come_back_from_every_place(name: str) -> None:
    value = ODD[name]()
    for way, through in WAYS.items():
        back = through(value)
        assert (back.dtype, back.shape) == (value.dtype, value.shape), way
        assert torch.equal(back, value), way


@pytest.mark.parametrize("part", [torch.ones(2), np.ones(2)], ids=["tensors", "arrays"])
def test_names_that_are_no_unicode_come_back_from_every_place(part: Any) -> None:
    returns({"\udcff": part, "b": part})


@pytest.mark.parametrize("name", images())
def test_images_come_back_from_every_place(name: str) -> None:
    returns(images()[name])


def test_a_structure_with_gaps_keeps_them() -> None:
    inner = np.dtype([("x", "i1"), ("y", "f4")], align=True)
    value = np.zeros((4, 3), np.dtype([("a", "i1"), ("b", ">f8"), ("c", inner, (2,))], align=True))
    noise = bytearray(b"\xa5" * value.nbytes)
    noisy = np.ndarray(value.shape, value.dtype, noise)
    for name in ("a", "b"):
        noisy[name] = 0
    for name in ("x", "y"):
        noisy["c"][name] = 0
    for through in WAYS.values():
        for given in (value, noisy, noisy[::2]):
            back = through(given)
            assert back.dtype == given.dtype
            assert np.array_equal(back, given)
            assert back.tobytes() == bytes(given.nbytes), "memory that nobody has written shows in the gaps"


def test_a_shared_list_of_bytearrays_is_kept_wherever_it_hangs() -> None:
    inner = [bytearray(b"z")]
    returns([inner, (inner, {"k": inner, (1, 2): [inner]}), {1: {2: {3: inner}}}])


VALUES = [
    bytearray(b"raw"), torch.ones(2, dtype=torch.complex128), torch.ones(2).to(torch.float8_e8m0fnu),
    tensor_of(torch.complex32, 3),
    np.ones((2, 2), ml_dtypes.bfloat16), ml_dtypes.float8_e4m3fn(1.5), np.bytes_(b"a\0"),
    [{"photo": Image.new("RGB", (2, 3), (1, 2, 3))}],
]  # fmt: skip


def test_every_place_of_the_package_gives_them_back(tmp_path: Path, store: Store) -> None:
    for place, value in enumerate(VALUES):
        name = f"x/{place}"
        store.save(name, value)
        assert same(store.load(name), value)

        @store.cached(prefix=f"computed/{place}")
        def computed(number: int) -> Any:
            return VALUES[number]

        assert same(computed(place), value)
        assert same(computed(place), value)
    with TreeCacheManager(tmp_path / "tree", memory_size=0) as tree:
        for place, value in enumerate(VALUES):
            tree.put(str(place), value)
            found = tree.get(str(place))
            assert found is not None
            assert same(found[0], value)
    for _ in range(2):
        with CachedDataset(VALUES, tmp_path / "samples", key="values") as cached:
            assert all(map(same, map(cached.__getitem__, range(len(VALUES))), VALUES))


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's warnings on its own quantised and nested tensors
    REFUSED: list[tuple[Any, str, Callable[[Any], Any]]] = [
        (memoryview(b"x"), "bytes(...)", bytes),
        (np.longdouble(1.5), "astype('float64')", lambda value: value.astype("float64")),
        (np.array([1.5], "g"), "astype('float64')", lambda value: value.astype("float64")),
        (np.array([1j], "G"), "astype('complex128')", lambda value: value.astype("complex128")),
        (np.array([1, "a", None], object), "tolist()", lambda value: value.tolist()),
        (np.zeros(2, [("a", "g"), ("b", "i4")]),
        "field 'a' cannot be kept in it; keep each field as an array of its own", lambda value: value["b"]),
        (np.zeros(2, [("a", ml_dtypes.bfloat16)]), "keep each field as an array of its own",
        lambda value: value["a"].copy()),
        (np.zeros(2, {"names": ["a", "b"], "formats": ["i4", "i4"], "offsets": [0, 2]}), "keep each field",
        lambda value: value["b"]),
        (np.matrix([[1]]), "numpy.asarray(...)", np.asarray),
        (torch.quantize_per_tensor(torch.ones(3), 0.5, 0, torch.qint8), "dequantize()",
        lambda value: value.dequantize()),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "unbind()",
        lambda value: list(value.unbind())),
        (torch.ones(2).to_mkldnn(), "to_dense()", lambda value: value.to_dense()),
        (torch.ones(2, device="meta"), "meta tensor", lambda value: torch.ones(2)),
        (torch.zeros(8, dtype=torch.uint8).view(torch.bits8), "view(torch.uint8)",
        lambda value: value.view(torch.uint8)),
        (torch.nn.Parameter(torch.ones(1)), "detach()", lambda value: value.detach()),
        (torch.nn.Linear(1, 1), "state_dict()",
        lambda value: {name: part.detach() for name, part in value.state_dict().items()}),
        (io.BytesIO(b"x"), "getvalue()", lambda value: value.getvalue()),
        (array.array("i", [1, 2]), "list(...)", list),
        ({"a": 1}.keys(), "list(...)", list),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "advice", "follow"), REFUSED, ids=lambda part: part if type(part) is str else ""
)
def test_what_is_refused_names_the_part_and_a_way_out_that_works(
    value: Any, advice: str, follow: Callable[[Any], Any]
) -> None:
    for give, start in ((dump, "value"), (pack, "sample")):
        with pytest.raises(SerializationError) as caught:
            give({"x": [1, value]})
        assert str(caught.value).startswith(f"{start}['x'][1]: ")
        assert advice in str(caught.value)
        with pytest.raises(SerializationError, match=f"^{start}: "):
            give(value)
    returns(follow(value))


def test_a_jagged_tensor_is_refused_too() -> None:
    """Made here, for torch imports its compiler to make one."""
    jagged = torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged)
    for give in (dump, pack):
        with pytest.raises(SerializationError, match=r"\['x'\].*unbind\(\)"):
            give({"x": jagged})
    returns(list(jagged.unbind()))


TABLES = [
    pa.table({"a": [1, None], "b": ["x", "y"]}), pa.table({}), pa.table({"a": []}),
    pa.record_batch({"a": [1, 2]}), pa.record_batch({"a": [1, 2, 3]})[1:2], pa.record_batch({"a": [1]})[:0],
]  # fmt: skip


@pytest.mark.parametrize("value", TABLES, ids=lambda value: f"{type(value).__name__} {value.num_rows}")
def test_tables_and_batches_come_back_wherever_they_hang(value: Any) -> None:
    for way, through in WAYS.items():
        back = through(value)
        assert type(back) is type(value), way
        assert back.schema == value.schema, way
        assert back.equals(value), way


def test_a_table_whose_chunks_have_dictionaries_of_their_own_comes_back() -> None:
    column = pa.chunked_array([pa.array(["x", "y"]).dictionary_encode(), pa.array(["z"]).dictionary_encode()])
    for through in WAYS.values():
        assert through(pa.table({"d": column}))["d"].to_pylist() == ["x", "y", "z"]


def test_what_msgpack_would_write_by_itself_is_no_disguise() -> None:
    """An ExtType with one of castore's numbers would change its type, a Timestamp would become a datetime."""
    odd = msgpack.ExtType(1, msgpack.packb([1]))
    back = saved([odd])[0]
    assert (type(back), back) == (msgpack.ExtType, odd)
    with pytest.raises(SerializationError, match=r"value\['a'\]: .*Timestamp"):
        dump({"a": msgpack.Timestamp(1, 2)})
    with pytest.raises(SerializationError, match=r"value\[0\]: .*memoryview"):
        dump([memoryview(b"abcd")[::2]])


def test_bits_that_lie_about_their_type_are_corrupt() -> None:
    for value in (torch.ones(2, dtype=torch.complex128), torch.ones(2).to(torch.float8_e8m0fnu)):
        name, data = dump(value)
        kind = str(value.dtype).removeprefix("torch.").encode()
        for other in (b"complex32", b"bool", b"float32", b"__name__"):
            with pytest.raises(Exception, match="no valid safetensors"):
                load(data.replace(kind, other.ljust(len(kind))[: len(kind)]), name)
    name, data = dump([Image.new("L", (300, 2))])
    with pytest.raises(Exception, match="no valid msgpack"):
        load(data.replace(b"\xcd\x01\x2c", b"\xcd\xff\xff"), name)
