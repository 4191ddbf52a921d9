"""`python -m castore`: the same as the `castore` command."""

from __future__ import annotations

from castore.cli.main import run

if __name__ == "__main__":
    run()
