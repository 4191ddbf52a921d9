"""Draws a store's figures for `castore stat`."""

from __future__ import annotations

import time
from collections.abc import Iterator

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from castore.cli.output import console, plural
from castore.settings import Settings
from castore.stats import RemoteUse, Stat
from castore.units import format_duration, format_size

_BAR = 24


def draw(stat: Stat, settings: Settings) -> None:
    """Print the panel."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for place, section in enumerate(filter(None, _sections(stat, settings))):
        if place:
            grid.add_row()
        for label, text in section:
            grid.add_row(label, text)
    out = console()
    path = Text.assemble(" ", (stat.path, "bold"), " ")
    title: Text | None = path
    if path.cell_len > out.width - 4:  # a panel cuts the end off a title that it cannot hold
        out.print(path, soft_wrap=True)
        title = None
    out.print(Panel(grid, title=title, title_align="left", box=box.ROUNDED, border_style="dim", expand=False))


_Section = list[tuple[str, Text]]


def _sections(stat: Stat, settings: Settings) -> Iterator[_Section]:
    yield [
        ("holds", _holds(stat)),
        ("logical", _size(stat.logical, "as plain files")),
        ("unique", _size(stat.unique, _unique(stat))),
        ("stored", _size(stat.stored, f"compressed: {_smaller(stat.compression_ratio)}{_saved(stat)}")),
        ("budget", _budget(stat)),
    ]
    yield _away(stat)
    yield _use(stat)
    yield _expiries(stat)
    yield _prefixes(stat)
    yield _dictionaries(stat)
    codec = settings.codec if settings.level is None else f"{settings.codec}, level {settings.level}"
    ttl = "never expire" if settings.ttl is None else f"expire after {format_duration(settings.ttl)}"
    yield [
        *_labelled("mounted", [Text(path) for path in stat.mounts]),
        ("new entries", Text(f"codec {codec}; {ttl}")),
    ]


def _away(stat: Stat) -> _Section:
    away = stat.away
    if not away.blobs:
        return []
    words = f"as stored there, in {plural(away.blobs, 'blob')}; bytes come when they are read"
    return [("in remotes", _size(away.stored, words))]


def _holds(stat: Stat) -> Text:
    entries, blobs = (
        " entry of " if stat.entries == 1 else " entries of ",
        " blob" if stat.blobs == 1 else " blobs",
    )
    return _bold(f"{stat.entries:,}", entries, f"{stat.blobs:,}", blobs)


def _use(stat: Stat) -> _Section:
    hits = stat.memory_hits + stat.disk_hits
    reads = _bold(f"{hits:,}", " hits, ", f"{stat.misses:,}", " misses")
    if hits + stat.misses:
        reads.append(f", {stat.hit_rate:.1%} found")
    section = [("reads", reads), ("evicted", _bold(f"{stat.evictions:,}", " entries so far"))]
    if stat.remotes.requests:
        section.append(("remotes", _remotes(stat.remotes)))
    use = stat.remotes
    if use.found + use.offered + use.left_alone:
        results = _bold(f"{use.found:,}", " found in remotes, ", f"{use.offered:,}", " offered")
        if use.left_alone:
            times = plural(use.left_alone, "time")
            results.append(f", a remote without an answer left alone for a minute {times}", "yellow")
        section.append(("results", results))
    if stat.corrupt:
        section.append(
            ("damaged", Text(f"{stat.corrupt:,} blobs so far; `castore verify` tells more", "red"))
        )
    return section


def _remotes(use: RemoteUse) -> Text:
    mean = use.seconds / use.requests * 1000
    text = _bold(
        f"{use.requests:,}", " requests, ", format_size(use.received), " in, ", format_size(use.sent), " out"
    )
    text.append(f", {mean:.0f} ms each", "dim")
    if use.retries:
        text.append(f", {use.retries:,} tried again", "yellow")
    return text.append(f", {use.errors:,} failed", "red") if use.errors else text


def _bold(*pieces: str) -> Text:
    """A text of pieces, alternately bold and plain."""
    return Text.assemble(*((piece, "" if place % 2 else "bold") for place, piece in enumerate(pieces)))


def _size(size: int, words: str) -> Text:
    return Text.assemble((f"{format_size(size):>8}", "bold"), "  ", (words, "dim"))


def _unique(stat: Stat) -> str:
    if stat.unique > stat.logical:
        return "without duplicates, and with what no name points to any more: gc removes it"
    return f"without duplicates: {_smaller(stat.dedupe_ratio)}"


def _smaller(ratio: float) -> str:
    return f"{ratio:.2f}x smaller" if ratio >= 1 else "no smaller"


def _saved(stat: Stat) -> str:
    if stat.away.blobs:  # names may share blobs that are away
        return ""
    saved = 1 - stat.stored / stat.logical if stat.logical else 0.0
    return f"; {saved:.0%} saved in all" if saved >= 0.01 else ""


def _budget(stat: Stat) -> Text:
    if stat.max_size is None:
        return Text.assemble(f"{'none':>8}", ("  `castore init --max-size 200GB` sets one", "dim"))
    part = stat.stored / stat.max_size if stat.max_size else 1.0
    colour = "green" if part < 0.8 else "yellow" if part <= 1 else "red"
    text = Text(f"{format_size(stat.max_size):>8}  ", "bold")
    return text.append_text(_bar(part, colour)).append(f" {part:.0%} full", "")


def _bar(part: float, colour: str) -> Text:
    filled = min(_BAR, round(part * _BAR))
    if part > 0:
        filled = max(filled, 1)
    return Text.assemble(("━" * filled, colour), ("─" * (_BAR - filled), "dim"))


def _expiries(stat: Stat) -> _Section:
    now = time.time()
    rows = [
        Text.assemble((f"{format_duration(max(0.0, when - now)):>8}  ", "bold"), name)
        for name, when in stat.next_expiries
    ]
    if stat.expired:
        rows.append(
            Text.assemble((f"{stat.expired:>8,}  ", "bold"), ("over already: gc removes them", "dim"))
        )
    return _labelled("expires in", rows)


def _prefixes(stat: Stat) -> _Section:
    if not stat.prefixes:
        return []
    most = max(prefix.logical for prefix in stat.prefixes) or 1
    rows = []
    for prefix, entries, logical in stat.prefixes:
        text = Text.assemble((f"{format_size(logical):>8}  ", "bold"), _bar(logical / most, "cyan"))
        rows.append(text.append(f"  {prefix} ").append(f"({entries:,})", "dim"))
    return _labelled("largest", rows)


def _dictionaries(stat: Stat) -> _Section:
    rows = []
    for prefix, number, size in stat.dictionaries:
        text = Text.assemble((f"{format_size(size) if size else 'lost':>8}", "bold" if size else "red"))
        rows.append(text.append(f"  {prefix or '/'} ").append(f"({number})", "dim"))
    return _labelled("dictionaries", rows)


def _labelled(label: str, rows: list[Text]) -> _Section:
    return [("" if place else label, row) for place, row in enumerate(rows)]
