"""Entries that need a dictionary are plain files in a mount, whichever process trained it, and when."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from castore import Store
from tests.clocks import pass_time
from tests.helpers import in_processes, records
from tests.mount.conftest import until
from tests.mount.test_damage import fails

pytestmark = pytest.mark.usefixtures("forked_processes")

SEEN, NEW = records(400, 1), records(60, 2)


def test_what_needs_a_dictionary_reads_like_any_file(live: Path, store: Store) -> None:
    """This includes a dictionary that another process trained while the mount was served."""
    in_processes(1, lambda _: store.train_dictionary("rec", SEEN))
    for number, data in enumerate(NEW):
        store.put(f"rec/{number}", data)
    assert [(live / "rec" / str(number)).read_bytes() for number in range(len(NEW))] == NEW
    with (live / "rec" / "7").open("rb") as file:
        file.seek(30)
        assert file.read(40) == NEW[7][30:70]


def test_without_its_dictionary_a_file_is_an_error_and_never_other_bytes(
    live: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.train_dictionary("rec", SEEN)
    entry = store.put("rec/x", NEW[0])
    assert os.getxattr(live / "rec" / "x", "user.castore.digest").decode() == entry.digest
    for path in (store.path / "objects" / "dicts").glob("*[0-9a-f].[sz]*"):
        path.unlink()
    with pytest.raises(OSError, match="error") as caught:
        (live / "rec" / "x").read_bytes()
    assert caught.value.errno == errno.EIO
    pass_time(monkeypatch, 1.1)  # for up to a second, a put may rely on a dictionary that was removed by hand
    with pytest.warns(RuntimeWarning, match="without their dictionary"):
        store.put("rec/x", NEW[0])
    until(lambda: fails((live / "rec" / "x").read_bytes) is None)
    assert (live / "rec" / "x").read_bytes() == NEW[0]
