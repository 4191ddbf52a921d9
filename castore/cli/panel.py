"""How `castore stat` draws a store."""

from __future__ import annotations

import time

from rich import box
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from castore.cli.output import console
from castore.settings import Settings
from castore.sizes import format_duration, format_size
from castore.stats import Stat

_BAR = 24


def draw(stat: Stat, settings: Settings) -> None:
    """Print the panel."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in _rows(stat, settings):
        grid.add_row(label, text)
    out = console()
    title = Text.assemble(" ", (stat.path, "bold"), " ")
    out.print(Panel(grid, title=title, title_align="left", box=box.ROUNDED, border_style="dim", expand=False))


def _rows(stat: Stat, settings: Settings) -> list[tuple[str, Text]]:
    rows = [("holds", _bold(f"{stat.entries:,}", " entries of ", f"{stat.blobs:,}", " blobs"))]
    rows.append(("logical", _size(stat.logical, "as plain files")))
    rows.append(("unique", _size(stat.unique, f"without duplicates: {stat.dedupe_ratio:.2f}x smaller")))
    rows.append(
        ("stored", _size(stat.stored, f"compressed: {stat.compression_ratio:.2f}x smaller{_saved(stat)}"))
    )
    rows.append(("budget", _budget(stat)))
    rows.append(("", Text()))
    hits = stat.memory_hits + stat.disk_hits
    reads = _bold(f"{hits:,}", " hits, ", f"{stat.misses:,}", " misses")
    rows.append(("reads", reads.append(f", {stat.hit_rate:.1%} found") if hits + stat.misses else reads))
    rows.append(("evicted", _bold(f"{stat.evictions:,}", " entries so far")))
    if stat.corrupt:
        rows.append(("damaged", Text(f"{stat.corrupt:,} blobs found; `castore verify` tells more", "red")))
    rows += _expiries(stat) + _prefixes(stat)
    rows += [("mounted" if place == 0 else "", Text(path)) for place, path in enumerate(stat.mounts)]
    codec = settings.codec if settings.level is None else f"{settings.codec}, level {settings.level}"
    ttl = "never expire" if settings.ttl is None else f"live {format_duration(settings.ttl)}"
    return [*rows, ("new entries", Text(f"codec {codec}; {ttl}"))]


def _bold(*pieces: str) -> Text:
    """Pieces that are bold by turns."""
    return Text.assemble(*((piece, "" if place % 2 else "bold") for place, piece in enumerate(pieces)))


def _size(size: int, words: str) -> Text:
    return Text.assemble((f"{format_size(size):>8}", "bold"), "  ", (words, "dim"))


def _saved(stat: Stat) -> str:
    if stat.stored >= stat.logical:
        return ""
    return f"; {1 - stat.stored / stat.logical:.0%} saved in all"


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


def _expiries(stat: Stat) -> list[tuple[str, Text]]:
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


def _prefixes(stat: Stat) -> list[tuple[str, Text]]:
    if not stat.prefixes:
        return []
    most = max(prefix.logical for prefix in stat.prefixes) or 1
    rows = []
    for prefix, entries, logical in stat.prefixes:
        text = Text.assemble((f"{format_size(logical):>8}  ", "bold"), _bar(logical / most, "cyan"))
        rows.append(text.append(f"  {prefix} ").append(f"({entries:,})", "dim"))
    return _labelled("largest", rows)


def _labelled(label: str, rows: list[Text]) -> list[tuple[str, Text]]:
    if not rows:
        return []
    return [
        ("", Text()),
        *((label if place == 0 else "", row) for place, row in enumerate(rows)),
        ("", Text()),
    ]
