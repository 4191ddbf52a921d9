"""Values of every kind, a comparison of two, and users' classes.

Workers import this module, not the tests.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import ipaddress
import pathlib
import types
import uuid
import warnings
import zoneinfo
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import BatchEncoding, BatchFeature, PreTrainedTokenizerFast

from tests.serialize.kinds.frames import FRAMES, is_frame, same_frames

UTC = dt.timezone.utc
PARIS = zoneinfo.ZoneInfo("Europe/Paris")

# --- classes ------------------------------------------------------------------------------------------------

Point = collections.namedtuple("Point", "x y")


class Pair(NamedTuple):
    image: Any
    label: int = 0


@dataclasses.dataclass
class Scan:
    """Its `__post_init__` must not run again: the attributes that it made are kept."""

    pixels: Any
    spacing: tuple[float, ...] = (1.0,)
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.made = vars(self).get("made", 0) + 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int
    y: Any = None


@dataclasses.dataclass(frozen=True)
class Versioned:
    """Its class has the value of a field."""

    rate: float
    version: int = dataclasses.field(default=2, init=False)
    note: str | None = dataclasses.field(default=None, init=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Slim:
    x: Any


T = TypeVar("T")


@dataclasses.dataclass
class Typed(Generic[T]):
    x: T


class Colour(enum.Enum):
    RED = 1
    GREEN = "green"
    CRIMSON = 1  # noqa: PIE796 - an alias


class Level(enum.IntEnum):
    LOW = 1


class Mode(str, enum.Enum):
    TRAIN = "train"


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Bits(enum.IntFlag):
    ONE = 1
    FOUR = 4


class Outer:
    class Inner(enum.Enum):
        HERE = 0


class Image(torch.Tensor):
    """A subclass like torchvision's tv_tensors: `as_subclass`, attributes, operations give plain tensors."""

    @classmethod
    def wrap(cls, data: torch.Tensor, **attributes: Any) -> Image:
        made = data.as_subclass(cls)
        made.__dict__.update(attributes)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
        return made.as_subclass(torch.Tensor) if isinstance(made, torch.Tensor) else made


class Volume(torch.Tensor):
    """A subclass like MONAI's MetaTensor: made by `__new__`, with metadata that its operations carry on."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, affine: torch.Tensor, meta: dict[Any, Any]) -> Volume:
        return data.as_subclass(cls)

    def __init__(self, data: torch.Tensor, affine: torch.Tensor, meta: dict[Any, Any]) -> None:
        self._meta = {**meta, Mode.TRAIN: affine}
        self._applied: list[Any] = [{Colour.RED: "Spacing", "dtype": torch.float64, "size": (8, 8)}]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        first = next((arg for arg in args if isinstance(arg, Volume)), None)
        if isinstance(made, Volume) and first is not None and not vars(made):
            made.__dict__.update(vars(first))
        return made


# --- values -------------------------------------------------------------------------------------------------


def _tokenizer() -> Any:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=tokenizer, pad_token="?")


RECORD = np.dtype([(("the title", "a"), "<i4"), ("b", [("c", "<f4", (2,)), ("d", "U3")])])
_rows = np.zeros(2, RECORD)
_rows["a"], _rows["b"]["d"] = [1, 2], ["x", "Ωy"]
_tokenizer_ = _tokenizer()

MASKED: Any = np.ma.MaskedArray
HASHABLE: list[Any] = [
    dt.datetime(2024, 2, 29, 1, 2, 3, 4),  # noqa: DTZ001
    dt.datetime(2024, 10, 27, 2, 30, tzinfo=PARIS, fold=1),
    dt.datetime(2024, 1, 1, tzinfo=UTC), dt.datetime(2024, 1, 1, tzinfo=UTC, fold=1),
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-3, minutes=30))),
    dt.datetime(1, 1, 1, tzinfo=dt.timezone(dt.timedelta(seconds=7), "odd")),
    dt.datetime(2024, 1, 1, fold=1),  # noqa: DTZ001
    dt.date(2024, 2, 29), dt.time(1, 2, 3, 4), dt.time(1, tzinfo=UTC, fold=1), dt.timedelta(-1, 2, 3), UTC,
    PARIS,
    decimal.Decimal("1.10"), decimal.Decimal("-0E+5"), decimal.Decimal("-Infinity"),
    fractions.Fraction(3, -9),
    uuid.UUID(int=7), uuid.UUID(int=9, is_safe=uuid.SafeUUID.safe),
    pathlib.Path("/a/b"), pathlib.PurePosixPath("a"), pathlib.PureWindowsPath("c:/x"), pathlib.Path("\udcff"),
    ipaddress.ip_address("10.0.0.1"), ipaddress.ip_address("fe80::1%eth0"),
    ipaddress.ip_network("10.0.0.0/8"), ipaddress.ip_interface("::1/64"),
    Colour.RED, Colour.GREEN, Level.LOW, Mode.TRAIN, Access.READ, Access.READ | Access.WRITE, Access(0),
    Bits.ONE | Bits.FOUR, Bits(64), Outer.Inner.HERE,
    Point(1, "y"), Frozen(1, (2,)), Versioned(1e-3), Slim("s"), range(1, 9, 3), frozenset(),
    frozenset({1, (2, "x"), frozenset({"y"})}),
    1.5, (1, 2.5), b"raw", "text", 2**70, -3, True, None, 1 + 2j, torch.float16, torch.Size([1, 2]),
    torch.device("cuda", 1),
]  # fmt: skip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's warnings that compressed layouts are new
    SPARSE = [
        torch.eye(3).to_sparse(), torch.eye(3, dtype=torch.bfloat16).to_sparse(),
        torch.zeros(2, 3).to_sparse(),
        torch.sparse_coo_tensor(torch.tensor([[1, 1]]), [1.0, 2.0], (3,)),
        torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 3), (3, 3)),
        torch.eye(4).to_sparse_csr(), torch.eye(4).to_sparse_csc(), torch.eye(4).to_sparse_bsr((2, 2)),
        torch.eye(4).to_sparse_bsc((2, 2)),
    ]  # fmt: skip

VALUES: list[Any] = [
    *HASHABLE, *SPARSE, set(), {1, 2}, {"b", "a"}, {("x", 1), 2.5}, set(map(str, range(30))),
    collections.OrderedDict(b=1, a=[2]), collections.OrderedDict(), collections.Counter("abca"),
    torch.nn.BatchNorm1d(2).state_dict(),  # a dict with an attribute
    collections.defaultdict(list, {1: [2]}),
    collections.defaultdict(None, x=1), collections.deque([1, [2]], 5), collections.deque(),
    types.SimpleNamespace(a=1, b=[2]), slice(1, None), slice(0, 9, 2),
    {1.5: 1, (1, "a"): [2], Colour.RED: {b"k": 3}, frozenset({1}): None, dt.date(2024, 1, 1): 5},
    Pair(torch.ones(2), 3), Point({1}, [Point(1, 2)]), Scan(np.ones(2), notes={"who": Colour.GREEN}),
    Frozen(1, {"deep": Slim(torch.zeros(2))}), Typed(3),
    Image.wrap(torch.arange(6, dtype=torch.uint8)),
    Image.wrap(torch.ones(1, 4), format=Colour.GREEN, canvas_size=(4, 5)),
    Volume(torch.arange(4.0).view(2, 2), torch.eye(4, dtype=torch.float64),
    {"path": "a.nii", "shape": np.array([8, 8])}),
    MASKED([1, 2, 3], [0, 1, 0], fill_value=7, hard_mask=True), np.ma.MaskedArray([1.5, 2]),
    np.ma.MaskedArray([[1, 2]], mask=True), np.ma.masked,
    MASKED(_rows, mask=[(1, (0, 1)), (0, (0, 0))]), np.ma.MaskedArray(5, mask=True),
    np.ma.MaskedArray(np.array(["2024-01-01"], "M8[D]")),
    _rows, _rows.view(np.recarray), _rows[1], _rows.view(np.recarray)[1], np.void(b"raw"),
    _rows.view(np.dtype((np.record, RECORD))), _rows[:0].view(np.recarray),
    _tokenizer_(["a b", "b"]), _tokenizer_(["a b", "b"], return_tensors="pt", padding=True),
    _tokenizer_("a"), BatchEncoding({"ids": [1]}), BatchFeature({"pixels": torch.ones(2)}), *FRAMES,
]  # fmt: skip


def nested() -> st.SearchStrategy[Any]:
    """Values of every kind inside one another."""
    hashable = st.recursive(
        st.sampled_from(HASHABLE) | st.datetimes(timezones=st.timezones() | st.none())
        | st.decimals(allow_nan=False)
        | st.fractions() | st.uuids() | st.timedeltas() | st.times() | st.dates() | st.text(max_size=4)
        | st.integers(),
        lambda inner: st.frozensets(inner, max_size=3) | st.builds(Point, inner, inner)
        | st.builds(Frozen, inner, inner) | st.builds(Slim, inner)
        | st.lists(inner, max_size=3).map(tuple),
        max_leaves=5,
    )  # fmt: skip
    return st.recursive(
        st.sampled_from(VALUES) | hashable,
        lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.dictionaries(hashable, inner, max_size=3).map(collections.OrderedDict)
        | st.builds(Pair, inner, st.integers()) | st.builds(Scan, inner)
        | st.lists(inner, max_size=3).map(lambda items: collections.deque(items, 4))
        | st.sets(hashable, max_size=4)
        | st.builds(lambda part: Image.wrap(torch.ones(3), meta=part), inner),
        max_leaves=8,
    )  # fmt: skip


# --- sameness -----------------------------------------------------------------------------------------------


def same(one: Any, two: Any) -> bool:  # noqa: C901 - one rule for each type
    """Whether two values are equal in type and value, all the way down."""
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return _same_tensors(one, two)
    if isinstance(one, enum.Enum) or one is np.ma.masked:
        return one is two
    if is_frame(one):
        return same_frames(one, two)
    if isinstance(one, np.ma.MaskedArray):
        return (
            same(np.asarray(one.data), np.asarray(two.data))
            and same(one.mask, two.mask)
            and same(np.asarray(one.fill_value), np.asarray(two.fill_value))
            and one.hardmask == two.hardmask
        )
    if isinstance(one, np.ndarray | np.generic):
        return _about_array(one) == _about_array(two) and one.tobytes() == two.tobytes()
    if isinstance(one, set | frozenset):
        return len(one) == len(two) and all(any(same(item, other) for other in two) for item in one)
    if isinstance(one, dict):
        factories = getattr(one, "default_factory", None) is getattr(two, "default_factory", None)
        items = same(list(one), list(two)) and same(list(one.values()), list(two.values()))
        return factories and items and _same_state(one, two)
    if isinstance(one, list | tuple | collections.deque):
        limits = getattr(one, "maxlen", None) == getattr(two, "maxlen", None)
        return limits and len(one) == len(two) and all(map(same, one, two)) and _same_state(one, two)
    if isinstance(one, BatchEncoding | BatchFeature):
        return all(map(same, map(_plain, vars(one).values()), map(_plain, vars(two).values())))
    if dataclasses.is_dataclass(one):
        fields = [field.name for field in dataclasses.fields(one)]
        # Fields that the class has are kept as well, so that they stay when the class changes.
        first, second = (
            {name: part for name, part in getattr(each, "__dict__", {}).items() if name not in fields}
            for each in (one, two)
        )
        return all(same(getattr(one, name), getattr(two, name)) for name in fields) and same(first, second)
    if isinstance(one, types.SimpleNamespace):
        return _same_state(one, two)
    if isinstance(one, dt.datetime | dt.time):
        zones = one.tzinfo is two.tzinfo or repr(one.tzinfo) == repr(two.tzinfo)
        return zones and one.fold == two.fold and one.replace(tzinfo=None) == two.replace(tzinfo=None)
    return repr(one) == repr(two)


def _about_array(value: Any) -> tuple[Any, ...]:
    return value.dtype, value.dtype.fields, value.dtype.type, value.shape


def _plain(value: Any) -> Any:
    """Encodings of the tokenizers library as plain values, for comparison."""
    return [part.__getstate__() for part in value] if isinstance(value, list) else value


def _same_state(one: Any, two: Any) -> bool:
    return same(getattr(one, "__dict__", None), getattr(two, "__dict__", None))


def _same_tensors(one: torch.Tensor, two: torch.Tensor) -> bool:
    if type(one) is not torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            plain = one.as_subclass(torch.Tensor), two.as_subclass(torch.Tensor)
        return _same_tensors(*plain) and same(vars(one), vars(two))
    if (one.dtype, one.shape, one.layout) != (two.dtype, two.shape, two.layout):
        return False
    if one.layout is torch.strided:
        return torch.equal(one, two)
    if one.layout is torch.sparse_coo:
        found = one.is_coalesced() == two.is_coalesced()
        return (
            found
            and torch.equal(one._indices(), two._indices())
            and torch.equal(one._values(), two._values())
        )
    return torch.equal(one.values(), two.values()) and torch.equal(one.to_dense(), two.to_dense())


class Checked(Dataset[bool]):
    """Whether a cache's answer is unchanged. Workers compare, because the way to their parent is a pickle."""

    def __init__(self, cached: Any) -> None:
        self.cached = cached

    def __len__(self) -> int:
        return len(self.cached)

    def __getitem__(self, index: int) -> bool:
        return same(self.cached[index], VALUES[index])


class Numbered(Dataset[Any]):
    """`VALUES`, without being pickled along."""

    def __len__(self) -> int:
        return len(VALUES)

    def __getitem__(self, index: int) -> Any:
        return VALUES[index]
