"""The pictures of the benchmark pages. Their figures are in the pages' tables too.

Colours are those of Okabe and Ito, which colour-blind readers can distinguish; every line has a marker of its
own as well. matplotlib is imported only where a picture is drawn: only the benchmarks' environment has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from tools.bench import report
from tools.bench.harness import Result

_BLACK, _ORANGE, _BLUE, _GREEN, _RED = "#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00"
_PURPLE = "#CC79A7"
Style: TypeAlias = tuple[str, str, str, float, float]
# In the order of the lines: colour, marker, dashes, line width, size of marker.
_STYLES: list[Style] = [
    (_BLACK, "s", "--", 1.2, 8.0),
    (_RED, "o", "-", 2.2, 5.0),
    (_BLUE, "x", "-", 1.2, 7.0),
    (_GREEN, "^", "-", 1.2, 6.0),
    (_PURPLE, "D", "-", 1.2, 5.0),
    (_ORANGE, "v", "-", 1.2, 6.0),
]
_STAR = (_ORANGE, "*", "none", 0.0, 13.0)


def styled(lines: Mapping[str, Sequence[float]]) -> Iterator[tuple[tuple[str, Sequence[float]], Style]]:
    """Each line with a style of its own.

    Raises:
        ValueError: There are more lines than styles.
    """
    return zip(lines.items(), _STYLES[: len(lines)], strict=True)


def hit_rates(
    path: Path,
    parts: Sequence[float],
    rates: Mapping[str, Mapping[str, Sequence[float]]],
    measured: Mapping[str, tuple[float, float]],
    measured_as: str,
) -> None:
    """Draw hit rates: one panel a trace, one line a policy.

    Args:
        path: of the PNG.
        parts: of the data that fit, from 0 to 1.
        rates: by trace and policy, a hit rate for each of ``parts``.
        measured: by trace, the part and the hit rate of a real dataset.
        measured_as: the legend's name for those.
    """
    figure, panels = _subplots(1, len(rates), (3.1 * len(rates), 3.6))
    for panel, (trace, lines) in zip(panels, rates.items(), strict=True):
        for (policy, values), (colour, marker, dashes, width, size) in styled(lines):
            # Open markers: where policies agree, all markers stay visible.
            panel.plot(
                [100 * part for part in parts],
                [100 * value for value in values],
                color=colour, marker=marker, linestyle=dashes, linewidth=width, markersize=size,
                fillstyle="none", label=policy,
            )  # fmt: skip
        colour, marker, dashes, width, size = _STAR
        part, value = measured[trace]
        panel.plot(
            [100 * part], [100 * value],
            color=colour, marker=marker, linestyle=dashes, linewidth=width, markersize=size,
            label=measured_as,
        )  # fmt: skip
        panel.set(title=trace, xlim=(0, 100), ylim=(-3, 103), xlabel="part of the data that fits, %")
    panels[0].set_ylabel("hits, % of reads")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    _save(figure, path)


_GREY = "#999999"  # for peers, beside castore's colour


class Bar(NamedTuple):
    """How many times as good as its row's reference a contestant is.

    Attributes:
        row: the question.
        contestant: its name.
        times: the ratio; above 1 is better than the reference.
        ours: whether it is castore.
    """

    row: str
    contestant: str
    times: float
    ours: bool


def bars(result: Result) -> list[Bar]:
    """A bar for each contestant but the reference, of a row that has peers and a reference."""
    reference = result.reference
    if reference is None or result.why_not(reference) or all(timing.ours for timing in result.timings):
        return []
    return [
        Bar(
            f"{result.name} (1 = {reference})", timing.name, result.ratio(timing.name, reference), timing.ours
        )
        for timing in result.timings
        if timing.name != reference and not timing.skipped
    ]


def ratios(path: Path, title: str, lines: Sequence[Bar]) -> None:
    """Draw horizontal bars from 1 to each ratio, on a logarithmic scale, under a heading for each row.

    Args:
        path: of the PNG.
        title: above all.
        lines: the bars; those of a row follow one another.
    """
    figure, (panel,) = _subplots(1, 1, (8.5, 1.2 + 0.24 * (len(lines) + len({bar.row for bar in lines}))))
    labels: list[str] = []
    for number, bar in enumerate(lines):
        if number == 0 or lines[number - 1].row != bar.row:
            labels.append(bar.row)
        place = len(labels)
        labels.append(bar.contestant)
        panel.barh(place, bar.times - 1, left=1, height=0.75, color=_RED if bar.ours else _GREY)
        panel.annotate(
            report.figure(bar.times), (bar.times, place),
            (4 if bar.times >= 1 else -4, 0), textcoords="offset points",
            va="center", ha="left" if bar.times >= 1 else "right", fontsize=7,
        )  # fmt: skip
    panel.axvline(1, color=_BLACK, linewidth=1)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter("{x:g}")
    panel.margins(x=0.18)
    panel.set_yticks(range(len(labels)), labels, fontsize=7)
    headings = {bar.row for bar in lines}
    for label, text in zip(panel.get_yticklabels(), labels, strict=True):
        label.set_fontweight("bold" if text in headings else "normal")
    panel.set_ylim(len(labels) - 0.4, -0.6)
    panel.set_title(title, fontsize=10)
    panel.set_xlabel("times as good as the row's reference (castore in orange)", fontsize=8)
    _save(figure, path)


def against_line(
    path: Path, parts: Sequence[float], times: Sequence[float], spreads: Sequence[tuple[float, float]]
) -> None:
    """Draw the time of an epoch by the part that is cached, with the straight line from none to all.

    Args:
        path: of the PNG.
        parts: that were cached, from 0 to 1, ascending.
        times: seconds of an epoch, one for each of ``parts``.
        spreads: least and greatest of those.
    """
    figure, (panel,) = _subplots(1, 1, (5.2, 3.6))
    cached = [100 * part for part in parts]
    low = [time - least for time, (least, _) in zip(times, spreads, strict=True)]
    high = [greatest - time for time, (_, greatest) in zip(times, spreads, strict=True)]
    panel.plot(
        [cached[0], cached[-1]], [times[0], times[-1]], color=_BLACK, linestyle="--", label="straight line"
    )
    panel.errorbar(
        cached, times, [low, high], color=_RED, marker="o", linestyle="none", capsize=3, label="measured"
    )
    panel.set(xlabel="samples in memory, % of the data", ylabel="one epoch, s", ylim=(0, None))
    panel.legend(frameon=False)
    _save(figure, path)


def growth(path: Path, sizes: Sequence[int], costs: Mapping[str, Sequence[float]]) -> None:
    """Draw the costs of operations, one line each, both axes in powers of ten.

    Args:
        path: of the PNG.
        sizes: entries in the store, ascending.
        costs: by operation, seconds for each of ``sizes``.
    """
    figure, (panel,) = _subplots(1, 1, (5.6, 4.2))
    for (what, seconds), (colour, marker, dashes, width, size) in styled(costs):
        panel.plot(
            sizes, [1e3 * value for value in seconds],
            color=colour, marker=marker, linestyle=dashes, linewidth=width, markersize=size, label=what,
        )  # fmt: skip
    panel.set(xscale="log", yscale="log", xlabel="entries in the store", ylabel="ms")
    figure.legend(loc="outside right center", frameon=False)
    _save(figure, path)


def against_change(path: Path, parts: Sequence[float], times: Mapping[str, Sequence[float]]) -> None:
    """Draw the time of a rerun by the part of the input that changed, one line each.

    Args:
        path: of the PNG.
        parts: of the rows that changed, from 0 to 1, ascending; 0 is drawn at the left edge.
        times: by contestant, seconds for each of ``parts``.
    """
    figure, (panel,) = _subplots(1, 1, (5.6, 3.8))
    least = min(part for part in parts if part)
    for (what, seconds), (colour, marker, dashes, width, size) in styled(times):
        panel.plot(
            [100 * part for part in parts], seconds,
            color=colour, marker=marker, linestyle=dashes, linewidth=width, markersize=size, label=what,
        )  # fmt: skip
    panel.set_xscale("symlog", linthresh=100 * least)
    panel.xaxis.set_major_formatter("{x:g}")
    panel.set(yscale="log", xlabel="rows that changed, %", ylabel="run again, s", xlim=(0, None))
    panel.legend(frameon=False)
    _save(figure, path)


def two_epochs(path: Path, unit: str, rates: Mapping[str, tuple[float, float]], ours: str) -> None:
    """Draw the rates of a first and a second epoch as horizontal bars, two for each contestant.

    Args:
        path: of the PNG.
        unit: of the rates.
        rates: by contestant, of both epochs.
        ours: how the names of castore's contestants begin.
    """
    figure, (panel,) = _subplots(1, 1, (6.4, 0.9 + 0.5 * len(rates)))
    for place, (name, (first, second)) in enumerate(rates.items()):
        colour = _RED if name.startswith(ours) else _GREY
        for at, rate, strength in ((place - 0.2, first, 0.55), (place + 0.2, second, 1.0)):
            panel.barh(at, rate, height=0.38, color=colour, alpha=strength)
            panel.annotate(
                report.figure(rate), (rate, at), (3, 0), textcoords="offset points", va="center", fontsize=7
            )
    panel.set_yticks(range(len(rates)), list(rates), fontsize=8)
    panel.set_ylim(len(rates) - 0.4, -0.6)
    panel.margins(x=0.12)
    panel.set_xlabel(f"{unit}: first epoch (pale), second epoch (full)", fontsize=8)
    _save(figure, path)


def _subplots(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # type: ignore[import-not-found]

    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(rows, columns, sharey=True, squeeze=False)
    for panel in panels.flat:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, [*panels.flat]


def _save(figure: Any, path: Path) -> None:
    # Without metadata the same figures make the same bytes.
    figure.savefig(path, dpi=130, facecolor="white", metadata={"Software": None})
