"""Base classes of mappers, filters and deduplicators, with access to a sample's text and its statistics.

An operator is a plain object: its parameters are its attributes, and its work changes none of them. So it
pickles into worker processes and hashes the same everywhere. Must never read anything but the given sample.
"""

from __future__ import annotations

import functools
import re
import sys
from importlib import import_module
from typing import Any, ClassVar

from castore.errors import InvalidValueError

#: The column of statistics, as Data-Juicer names it.
STATS = "__dj__stats__"
#: The prefix of the deduplicators' columns; an export leaves out these columns and the statistics.
HASHES = "__dj__hash"

#: "No upper bound" for counts.
UNBOUNDED = sys.maxsize

Sample = dict[str, Any]


class NeedsMoreError(InvalidValueError):
    """An operator needs something that castore lacks: a model, a list of words, a package that is not
    installed.
    """


class Operator:
    """An operation on the text of each sample.

    Args:
        text_key: the column of the text.
    """

    _name: ClassVar[str]
    # Incremented whenever a fixed operator gives other results: kept results of the earlier one no longer
    # serve.
    _castore_revision: ClassVar[int] = 1

    def __init_subclass__(cls) -> None:
        # The name in recipes and reports: TextLengthFilter is text_length_filter.
        cls._name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    def __init__(self, *, text_key: str = "text") -> None:
        self.text_key = text_key

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in vars(self).items())})"
        )

    def text_of(self, sample: Sample) -> str:
        """The text of a sample; a missing value is an empty text.

        Raises:
            InvalidValueError: the sample has no such column, or the column does not hold text.
        """
        try:
            text = sample[self.text_key]
        except KeyError:
            columns = ", ".join(map(repr, sample))
            raise InvalidValueError(
                f"there is no column {self.text_key!r} for {self._name}, only {columns}; set text_keys"
            ) from None
        if text is None:
            return ""
        if not isinstance(text, str):
            raise InvalidValueError(
                f"{self._name} needs text in the column {self.text_key!r}, not {type(text).__name__}; set "
                "text_keys to a column of text"
            )
        return text


class Mapper(Operator):
    """Changes the text of a sample."""

    def clean(self, text: str) -> str:
        """The cleaned text."""
        raise NotImplementedError

    def process(self, sample: Sample) -> Sample:
        """The sample with its text changed."""
        sample[self.text_key] = self.clean(self.text_of(sample))
        return sample


class Filter(Operator):
    """Keeps the samples whose figure lies between two bounds, both included.

    Attributes:
        stat: name of the figure in the column of statistics.
    """

    stat: ClassVar[str]

    def __init__(self, low: float, high: float, *, names: tuple[str, str], text_key: str = "text") -> None:
        super().__init__(text_key=text_key)
        if not low <= high:
            raise InvalidValueError(
                f"{names[0]}={low!r} is above {names[1]}={high!r} in {type(self).__name__}: it would keep "
                "nothing; swap the two"
            )
        # Under the user's parameter names: a message about changes shows these names.
        setattr(self, names[0], low)
        setattr(self, names[1], high)

    def measure(self, text: str) -> float:
        """The figure of a text."""
        raise NotImplementedError

    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest figure that is kept."""
        raise NotImplementedError

    def compute_stats(self, sample: Sample) -> Sample:
        """The sample with the figure among its statistics."""
        # Always measured again: after a mapper in between, or a filter of the same name with another window,
        # an existing figure may be another one's.
        sample[STATS] = {**(sample.get(STATS) or {}), self.stat: self.measure(self.text_of(sample))}
        return sample

    def process(self, sample: Sample) -> bool:
        """Whether the sample stays."""
        low, high = self.bounds()
        return bool(low <= sample[STATS][self.stat] <= high)


class CountFilter(Filter):
    """A filter on a length: ``min_len`` to ``max_len``."""

    min_len: float
    max_len: float

    def __init__(self, min_len: int = 10, max_len: int = UNBOUNDED, *, text_key: str = "text") -> None:
        super().__init__(min_len, max_len, names=("min_len", "max_len"), text_key=text_key)

    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest figure that is kept."""
        return self.min_len, self.max_len


class RatioFilter(Filter):
    """A filter on a part of the whole, from 0 to 1: ``min_ratio`` to ``max_ratio``."""

    min_ratio: float
    max_ratio: float

    def __init__(self, min_ratio: float, max_ratio: float, *, text_key: str = "text") -> None:
        for name, value in (("min_ratio", min_ratio), ("max_ratio", max_ratio)):
            if not 0 <= value <= 1:
                raise InvalidValueError(f"{name}={value!r} in {type(self).__name__}: a ratio is from 0 to 1")
        super().__init__(min_ratio, max_ratio, names=("min_ratio", "max_ratio"), text_key=text_key)

    def bounds(self) -> tuple[float, float]:
        """The smallest and the largest figure that is kept."""
        return self.min_ratio, self.max_ratio


class Deduplicator(Operator):
    """Gives each sample a hash, then keeps one of each kind.

    Attributes:
        column: the column of the hash.
    """

    column: ClassVar[str]

    def compute_hash(self, sample: Sample) -> Sample:
        """The sample with its hash."""
        raise NotImplementedError

    def process(self, dataset: Any) -> Any:
        """The dataset without duplicates: the first sample of each kind stays."""
        raise NotImplementedError

    def hashes(self, dataset: Any) -> Any:
        """The hashes of a dataset, as Arrow tables of one column, ten thousand rows each."""
        return dataset.select_columns([self.column]).with_format("arrow").iter(batch_size=10_000)


def check_at_least(least: int, value: int, what: str) -> int:
    """``value``, if it is not below ``least``.

    Raises:
        InvalidValueError: the value is below ``least``.
    """
    if value < least:
        raise InvalidValueError(f"{what}={value!r} must be at least {least}")
    return value


@functools.lru_cache(maxsize=256)
def compile_pattern(pattern: str, what: str) -> re.Pattern[str]:
    """A regular expression, with ``.`` for any character, line breaks too.

    With properties of Unicode, as in ``\\p{P}`` for punctuation, it is one of the package regex. Operators
    keep the text of their expressions and compile it here where they use it, once a process.

    Raises:
        InvalidValueError: the pattern is no regular expression.

    >>> compile_pattern(r"\\p{P}+", "pattern").sub("", "a, b.")
    'a b'
    """
    # Data-Juicer's recipes may write a pattern with the quotes of a Python raw string.
    if len(pattern) > 3 and pattern[:2] in ("r'", 'r"') and pattern[-1] == pattern[1]:
        pattern = pattern[2:-1]
    engine: Any = re
    if re.search(r"\\[pP]\{", pattern):
        try:
            engine = import_module("regex")
        except ImportError:
            raise NeedsMoreError(
                f"{what}={pattern!r} uses a Unicode property, which needs the package regex; pip install "
                "regex"
            ) from None
    try:
        found: re.Pattern[str] = engine.compile(pattern, engine.DOTALL)
    except engine.error as error:
        raise InvalidValueError(f"{what}={pattern!r} is not a regular expression: {error}") from None
    return found
