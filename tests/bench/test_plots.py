"""The part of the plots that runs without matplotlib, which only the benchmarks' environment has."""

from __future__ import annotations

import pytest

from tools.bench import plots


def test_each_line_of_a_plot_has_a_style_of_its_own() -> None:
    pytest.importorskip("torch")
    from tools.bench import hitrates

    drawn = list(plots.styled(dict.fromkeys(hitrates.POLICIES, (0.5,))))
    assert [policy for (policy, _), _ in drawn] == [*hitrates.POLICIES]
    assert len({style for _, style in drawn}) == len(drawn)


def test_more_lines_than_styles_are_an_error_and_not_left_out() -> None:
    with pytest.raises(ValueError, match="zip"):
        list(plots.styled({str(line): [0.5] for line in range(7)}))
