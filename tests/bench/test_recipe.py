"""The steps of the recipes, whose rows a suite counts."""

from __future__ import annotations

from pathlib import Path

import datasets

from castore import Store
from castore.adapters.datasets import Pipeline
from tests.adapters.datasets.small_blocks import small_blocks
from tools.bench import recipe


def test_a_step_whose_rows_are_counted_is_kept_block_by_block(tmp_path: Path) -> None:
    """Regression: the counter was taken for memory of rows, so the suite's killed runs began anew each time.

    The tests make an error of the warning that such steps give.
    """
    texts = datasets.Dataset.from_dict({"text": [f"a text of words, {number}" for number in range(600)]})
    chain = recipe.counted(recipe.operators("text", 100, list), str(tmp_path / "rows"))
    with small_blocks(), Store(tmp_path / "store") as store:
        Pipeline(chain, store=store).run(texts)
        assert (tmp_path / "rows").stat().st_size == 5 * 600
        more = datasets.concatenate_datasets([texts, texts.select([0])])
        Pipeline(chain, store=store).run(more)
    assert 5 <= (tmp_path / "rows").stat().st_size - 5 * 600 < 5 * 600
