"""Fuzzes one of castore's parsers with atheris (libFuzzer).

`python tools/fuzz.py TARGET --runs N`; `--list` prints the targets, which are those of
tests/torture/fuzzing.py. The exit code is 0 if castore accepted every input or refused it with its own error.
Any other input is printed, and libFuzzer keeps it in the working folder. Needs `pip install "castore[fuzz]"`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Seconds for one input; a longer run counts as a hang.
PATIENCE = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", nargs="?")
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--memory", type=int, default=1024, help="bound in MB")
    parser.add_argument("--list", action="store_true")
    given = parser.parse_args()
    sys.path[:0] = [str(ROOT), str(ROOT / "fuse")]

    import atheris

    with atheris.instrument_imports(include=["castore"]):
        from tests.torture.fuzzing import TARGETS, feed, seeds
    if given.list or given.target not in TARGETS:
        print("\n".join(TARGETS))
        sys.exit(0 if given.list else 2)
    corpus = Path(tempfile.mkdtemp(prefix="castore-fuzz-seeds-"))
    (corpus / "seed").write_bytes(seeds()[given.target])
    target = TARGETS[given.target]
    limits = [
        f"-runs={given.runs}",
        f"-rss_limit_mb={given.memory}",
        f"-timeout={PATIENCE}",
        "-max_len=20000",
    ]
    atheris.Setup([sys.argv[0], *limits, str(corpus)], lambda data: feed(target, data) and None)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
