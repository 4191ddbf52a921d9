"""The texts that suites measure on."""

from __future__ import annotations

import json
from pathlib import Path

from tools.bench import texts


def test_shards_have_their_size_and_share_no_line(tmp_path: Path) -> None:
    shards = texts.shards(tmp_path / "shards", 3, 100_000)
    assert [path.stat().st_size for path in shards] == [100_000] * 3
    lines = [path.read_bytes().splitlines()[:-1] for path in shards]  # the last line is cut
    numbers = [json.loads(line)["id"] for some in lines for line in some]
    assert len(set(numbers)) == len(numbers) > 3
