"""A sample comes back as it went in, or is refused with the place in it; a record is a safetensors file."""

from __future__ import annotations

import collections
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo
from torch.utils.data import default_collate

from castore import SerializationError
from castore.adapters.torch.samples import pack, unpack
from castore.serialize.serializers import dump, load
from tests.images import photo

DTYPES = [
    getattr(torch, name)
    for name in [
        "bool",
        "uint8",
        "int8",
        "uint16",
        "int16",
        "uint32",
        "int32",
        "uint64",
        "int64",
        "float16",
        "bfloat16",
        "float32",
        "float64",
        "complex32",
        "complex64",
        "complex128",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    ]
    if hasattr(torch, name)
]


#: Types that NumPy has, by size: as such a type, any tensor shows its bits.
PLAIN = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def tensor_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits (of bools: 0 and 1), so that NaNs and subnormal numbers are among them."""
    count = math.prod(shape) * dtype.itemsize
    bits = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return bits.view(dtype).view(shape)


def bits(value: Any) -> bytes:
    return bytes(value.view(PLAIN[value.element_size()]).numpy().tobytes()) if value.numel() else b""


def same(first: Any, second: Any) -> bool:
    """Whether two samples are equal in type and value, NaNs bit for bit."""
    if type(first) is not type(second):
        return False
    if isinstance(first, torch.Tensor):
        return (first.dtype, first.shape) == (second.dtype, second.shape) and bits(first) == bits(second)
    if isinstance(first, np.ndarray | np.generic):
        return (first.dtype, first.shape) == (
            second.dtype,
            second.shape,
        ) and first.tobytes() == second.tobytes()
    if isinstance(first, dict):
        kinds = [(type(key), key) for key in first] == [(type(key), key) for key in second]
        return kinds and all(same(first[key], second[key]) for key in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, float | complex):
        return repr(first) == repr(second)
    if isinstance(first, Image.Image):
        return (first.mode, first.size, first.tobytes(), first.getpalette(), first.info) == (
            second.mode, second.size, second.tobytes(), second.getpalette(), second.info
        )  # fmt: skip
    return bool(first == second)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (3, 5), (1, 2, 3, 4)], ids=str)
def test_tensors_of_every_dtype_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    sample = {"x": tensor_of(dtype, *shape), "y": 7}
    assert same(unpack(pack(sample)), sample)


def test_the_list_of_dtypes_is_complete() -> None:
    """A dtype that torch has and the list lacks is one that cannot hold a sample by itself."""
    there = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    odd = {str(dtype).removeprefix("torch.") for dtype in there - set(DTYPES)}
    sub_byte = {f"{kind}{width}" for kind in ("int", "uint") for width in range(1, 8)}
    bare = {"bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"}
    assert odd <= sub_byte | bare | {"qint8", "quint8", "qint32", "quint4x2", "quint2x4"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex32, torch.complex64], ids=str)
def test_tensors_of_any_layout_come_back(dtype: torch.dtype) -> None:
    whole = tensor_of(dtype, 4, 6, 8)
    sample = [whole.transpose(0, 2), whole[1:, ::2], whole[2], whole[0, 0, 1], whole.expand(2, 4, 6, 8)]
    assert same(unpack(pack(sample)), sample)


def test_lazy_conjugates_and_negatives_come_back_resolved() -> None:
    number = torch.tensor([1 + 2j, -3 - 4j])
    sample = (number.conj(), number.conj().imag, number.to(torch.complex128).conj()[::2])
    assert all(map(torch.equal, unpack(pack(sample)), (part.resolve_conj().resolve_neg() for part in sample)))


ARRAYS = [
    *(np.arange(6).reshape(2, 3).astype(kind) for kind in ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8",
        "u8", "f2", "f4", "f8", "c8", "c16"]),
    np.array(2.5), np.array(7, "i2"), np.zeros((0, 3), "f4"), np.array([]), np.array("word"),
    np.array(["a", "bcd", ""]), np.array([b"a", b"bcd"]), np.array([["x", "Ω"]]), np.array([1, 2], ">i4"),
    np.array(["2024-02-29", "NaT"], "M8[D]"), np.array(["2024-02-29T12:00:00.5"], "M8[ns]"),
    np.array(3, "m8[s]"),
    np.array([1, 2], "m8[25us]"), np.array([], "M8[ms]"), np.array(["2024-02-29"], ">M8[D]"),
    np.array([(1, 2.5)], [("a", "i4"), ("b", "f8")]), np.array([b"raw"], "V3"),
    np.asfortranarray(np.arange(12.0).reshape(3, 4)), np.arange(20)[::3], np.arange(12).reshape(3, 4).T,
]  # fmt: skip


@pytest.mark.parametrize("value", ARRAYS, ids=lambda array: f"{array.dtype}{array.shape}")
def test_arrays_come_back_with_dtype_shape_and_values_and_can_be_written(value: np.ndarray[Any, Any]) -> None:
    back = unpack(pack(value))
    assert same(back, value)
    assert back.flags.writeable


SCALARS = [
    np.bool_(True), np.int8(-3), np.uint64(2**64 - 1), np.float16(0.1), np.float32("nan"), np.float64(0.1),
    np.complex64(1 + 2j), np.complex128(1e300 - 2j), np.datetime64("2024-02-29", "D"), np.datetime64("NaT"),
    np.timedelta64(5, "h"), np.str_(""), np.str_("Ω\0"), np.bytes_(b""), np.bytes_(b"\0x\0"),
]  # fmt: skip


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: f"{type(value).__name__} {value!r}")
def test_numpy_scalars_keep_their_type(value: Any) -> None:
    back = unpack(pack({"value": value}))["value"]
    assert same(back, value)
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**63, -(2**63) - 1, 10**400, 0.1, -0.0, math.inf,
        -math.inf,
        math.nan, 5e-324, 1 + 2j, complex("nan"), complex(-0.0, math.inf), "", "Ω\0\U0001f600", "\udcff", b"",
        b"\0\xff",
        bytearray(b"xy"), (), [], {}, (None,), [[]], ((), []), [1, 2, 3], (1, 2**63), [1, 2.5], [True, 1],
        [True, False],
        (False,), [0.5, math.nan], [2**70, -1], {"a": 1, 2: "b", True: 1, None: 0}, {1: "int"},
        {True: "bool"},
        {"a.b": 1, "a": {"b": 2}}, {"": 1, "sample": 2}, {"__metadata__": 3}, {"\udcff": 1}, {"0": 1, 0: 2},
        {10**30: 1},
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_plain_values_come_back_in_type_and_value(value: object) -> None:
    assert same(unpack(pack(value)), value)
    assert same(unpack(pack([value, {"deep": (value,)}])), [value, {"deep": (value,)}])


def images() -> dict[str, Image.Image]:
    colours = Image.frombytes("RGB", (13, 7), bytes(np.random.default_rng(0).integers(0, 256, 273, "u1")))
    modes = ["1", "L", "LA", "P", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "HSV", "LAB", "I", "F"]
    found = {
        mode: colours.convert("RGBA").convert(mode) if mode == "LA" else colours.convert(mode)
        for mode in modes
    }
    del found["LAB"].info["icc_profile"]  # of the conversion, and not kept
    found["La"], found["RGBa"] = found["LA"].convert("La"), found["RGBA"].convert("RGBa")
    found["PA"] = found["P"].convert("PA")
    found["I;16"] = Image.frombytes("I;16", (3, 2), bytes(range(12)))
    found["empty"] = Image.new("RGB", (0, 5))
    found["few colours"] = Image.new("P", (2, 2), 1)
    found["few colours"].putpalette([1, 2, 3, 4, 5, 6])
    found["clear palette"] = Image.new("P", (2, 2), 1)
    found["clear palette"].putpalette([1, 2, 3, 4, 5, 6, 7, 8], "RGBA")
    found["clear index"] = found["P"].copy()
    found["clear index"].info["transparency"] = 3
    found["clear indices"] = found["P"].copy()
    found["clear indices"].info["transparency"] = b"\0\x80\xff"
    found["clear colour"] = colours.copy()
    found["clear colour"].info["transparency"] = (1, 2, 3)
    return found


def test_keys_may_be_integers_of_any_length() -> None:
    sample = {10**5000: 1, 1: {-(10**6000): "a"}}
    assert unpack(pack(sample)) == sample


@pytest.mark.parametrize("name", images())
def test_images_come_back_with_mode_size_pixels_palette_and_transparency(name: str) -> None:
    image = images()[name]
    back = unpack(pack((image, 1)))[0]
    assert same(back, image)
    if image.mode not in ("I;16", "LAB", "HSV", "La", "RGBa", "I", "F"):
        assert back.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


def test_an_image_from_a_file_comes_back_as_a_plain_image(tmp_path: Any) -> None:
    images()["clear indices"].save(tmp_path / "x.png")
    with Image.open(tmp_path / "x.png") as opened:
        back = unpack(pack(opened))
        assert type(back) is Image.Image
        assert back.convert("RGBA").tobytes() == opened.convert("RGBA").tobytes()


def test_images_keep_what_their_files_say() -> None:
    texts = PngInfo()
    texts.add_itxt("title", "Ä", "de")
    for opened in (
        photo(6, format="JPEG", dpi=(72, 72), icc_profile=b"profile", comment=b"comment"),
        photo(6, format="PNG", pnginfo=texts),
        photo(6, format="TIFF"),
    ):
        for back in (unpack(pack([opened]))[0], load(dump([opened])[1], "msgpack")[0]):
            assert back.info == opened.info
            assert ImageOps.exif_transpose(back).size == ImageOps.exif_transpose(opened).size == (2, 4)


def test_values_beside_an_image_that_bytes_do_not_have_are_left_out() -> None:
    image = Image.new("L", (2, 2))
    image.info |= {"kept": [(1, 2.5), {"a": b"b"}], "left out": object(), "array": np.zeros(2)}
    image.info["nested"] = nested = [image.info["kept"]]
    for _ in range(20):
        nested[:] = [list(nested)]
    assert unpack(pack(image)).info == {"kept": [(1, 2.5), {"a": b"b"}]}


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("make", "path", "remedy"),
    [
        (lambda: iter([1]), "sample", "list(...)"),
        (lambda: {"x": [0, object()]}, "sample['x'][1]", "register_type(object"),
        (lambda: (Point(1, object()),), "sample[0].y", "register_type(object"),
        (lambda: [collections.UserDict()], "sample[0]", "dict(...)"),
        (lambda: {(1, 2): object()}, "sample[(1, 2)]", "register_type(object"),
        (lambda: {"a": {object: 3}}, "sample['a'].keys()", "register_type(type"),
        (lambda: np.array([None]), "sample", "tolist()"),
        (lambda: np.longdouble(1), "sample", "float64"),
        (lambda: np.array([1], np.longdouble), "sample", "float64"),
        (lambda: [1, np.longlong(1)], "sample[1]", "item()"),
        (lambda: {"w": torch.ones(2, requires_grad=True) * 2}, "sample['w']", "detach()"),
        (lambda: {"w": torch.ones(2, requires_grad=True).bfloat16()}, "sample['w']", "detach()"),
        (lambda: torch.nn.Parameter(torch.ones(1)), "sample", "detach()"),
        (lambda: torch.quantize_per_tensor(torch.rand(3), 0.1, 0, torch.qint8), "sample", "dequantize()"),
        (lambda: torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "sample", "unbind()"),
        (lambda: torch.ones(2, device="meta"), "sample", "meta"),
        (lambda: memoryview(b"x"), "sample", "bytes(...)"),
        (lambda: Image.new("BGR;15", (1, 1)) if "BGR;15" in Image.MODES else Image.new("I;16B", (1, 1)),
         "sample", "convert('RGB')"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_would_not_come_back_is_refused_with_its_place_and_a_remedy(
    make: Callable[[], object], path: str, remedy: str
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch on its own quantised and nested tensors
        sample = make()
    with pytest.raises(SerializationError) as caught:
        pack(sample)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert remedy in message


def test_samples_that_contain_themselves_are_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(SerializationError, match="contains itself"):
        pack(loop)


def test_a_record_is_a_safetensors_file_with_names_from_the_sample(tmp_path: Any) -> None:
    sample = {
        "image": torch.arange(6, dtype=torch.uint8).view(1, 2, 3),
        "label": 5,
        "boxes": [torch.ones(4, dtype=torch.bfloat16), np.float32(0.5)],
        "caption": "Ω",
        "wave": torch.tensor([1 + 2j], dtype=torch.complex128),
        "photo": Image.new("RGB", (3, 2), (1, 2, 3)),
    }
    path = tmp_path / "sample.safetensors"
    path.write_bytes(pack(sample))
    with safetensors.safe_open(path, "pt") as file:
        got = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert torch.equal(got["image"], sample["image"])  # type: ignore[arg-type]
    assert got["label"].item() == 5
    assert got["label"].dtype == torch.int64
    assert torch.equal(got["boxes.0"], torch.ones(4, dtype=torch.bfloat16))
    assert got["boxes.1"].item() == 0.5
    assert bytes(got["caption"].numpy()).decode() == "Ω"
    assert got["wave"].tolist() == [[1.0, 2.0]]
    assert got["photo"].tolist() == [[[1, 2, 3]] * 3] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_safetensors_reads_records_of_every_dtype(dtype: torch.dtype) -> None:
    assert list(safetensors.torch.load(pack(tensor_of(dtype, 3, 2)))) == ["sample"]


def test_equal_samples_give_equal_records_and_headers_say_nothing_of_values() -> None:
    first, second = ({"x": torch.full((3,), value), "y": int(value), "s": f"{value}"} for value in (1.5, 2.5))
    assert pack(first) == pack({"x": torch.full((3,), 1.5), "y": 1, "s": "1.5"})
    assert pack(first)[: -3 * 4 - 8 - 3] == pack(second)[: -3 * 4 - 8 - 3]


def test_tensors_are_aligned_views_of_one_buffer_that_belongs_to_the_sample() -> None:
    record = bytearray(
        pack((torch.ones(3, dtype=torch.uint8), 1, torch.ones(5), np.ones(3), torch.ones(1).half()))
    )
    sample = unpack(record)
    for part in (sample[0], sample[2], torch.from_numpy(sample[3]), sample[4]):
        assert part.data_ptr() % part.element_size() == 0
    sample[2].zero_()
    assert unpack(record)[2].sum() == 0
    whole = bytes(record)
    again = unpack(whole)
    again[0].zero_()
    assert whole == bytes(record)
    assert unpack(memoryview(whole))[0].sum() == 3


def test_a_sample_of_views_takes_its_own_bytes_along_and_no_others() -> None:
    """A worker sends samples to the main process by their storages: these must not be the whole record."""
    small, _ = unpack(pack((torch.ones(3, dtype=torch.uint8), torch.ones(1000))))
    assert small.untyped_storage().nbytes() == 3
    assert small.untyped_storage().resizable() is False or small.clone().sum() == 3


def test_batches_collate() -> None:
    samples = [unpack(pack({"x": torch.full((2, 2), i), "y": i, "name": f"n{i}"})) for i in range(3)]
    batch = default_collate(samples)
    assert batch["x"].shape == (3, 2, 2)
    assert batch["y"].tolist() == [0, 1, 2]
    assert batch["name"] == ["n0", "n1", "n2"]


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers(),
    st.sampled_from(DTYPES).map(lambda dtype: tensor_of(dtype, 2, 3)), st.sampled_from(ARRAYS),
    st.sampled_from(SCALARS),
)  # fmt: skip
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.none())
samples = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(keys, inner, max_size=4),
        st.lists(st.integers()), st.lists(st.floats()),
    ),
    max_leaves=20,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(samples)
def test_any_sample_comes_back_and_is_a_safetensors_file(sample: Any) -> None:
    record = pack(sample)
    assert same(unpack(record), sample)
    assert same(unpack(bytearray(record)), sample)
    safetensors.torch.load(record)
    assert pack(sample) == record
