"""The crash windows of dictionaries. windows.py has the others, and explains how to read them."""

from __future__ import annotations

from pathlib import Path

from castore import Store, training
from castore.objects import dictionaries
from castore.objects.dictionaries import Dictionaries
from castore.objects.loose import LooseFolder
from castore.objects.packs import PackWriter
from castore.repair import dictionary_repair, doctor
from castore.write.prefixes import Prefixes
from tests.helpers import records
from tests.torture.kills import after, before
from tests.torture.windows import (
    BASE,
    Task,
    There,
    Window,
    dead,
    nothing,
    strays,
    temporary,
    unregistered_pack,
    within,
)

_SAMPLES = records(400, 1)
_RECORDS = {f"rec/{number:04}": data for number, data in enumerate(records(250, 2))}


def copies_of_it(count: int, *, chosen: bool) -> There:
    """Only this many copies of a dictionary on the disk, and a prefix that has it or none."""
    return lambda store: (
        nothing(store)
        and len(list(store.objects.dictionaries.folder.glob("*[0-9a-f].[sz]*"))) == count
        and len(store.stat().dictionaries) == chosen
    )


def _temporary(store: Store) -> bool:
    return temporary(0o400)(store) and store.objects.dictionaries.numbers() == []


def _train(store: Store) -> None:
    store.train_dictionary("rec", _SAMPLES)


def _records(store: Store) -> None:
    store.put_many(_RECORDS.items())
    _train(store)


def _idle(store: Store) -> None:
    _train(store)
    store.drop_dictionary("rec")


def _unregistered(store: Store) -> bool:
    return unregistered_pack(store) and len(strays(store)) == 1


_training = Task(within(_train))
_rewriting = Task(within(lambda store: store.recompress("rec")), within(_records), {**BASE, **_RECORDS})


def _examine(path: Path) -> None:
    doctor.examine(path)


_removing = Task(_examine, within(_idle))

WINDOWS = [
    Window("Training a dictionary", *row)
    for row in (
        ("before the first copy has its name", _training, after(LooseFolder, "seal"), _temporary),
        (
            "between the copies, or before `prefixes.json` has its name",
            _training,
            after(Dictionaries, "_write"),
            copies_of_it(1, chosen=False),
        ),
        (
            "between the copies, or before `prefixes.json` has its name",
            _training,
            before(Prefixes, "set"),
            copies_of_it(2, chosen=False),
        ),
        (
            "after that, before the beacon's `prefixes`",
            _training,
            before(Prefixes, "announce_change"),
            copies_of_it(2, chosen=True),
        ),
        ("after that", _training, after(Prefixes, "announce_change"), copies_of_it(2, chosen=True)),
    )
]
WINDOWS += [
    Window("Rewriting with a dictionary", *row)
    for row in (
        ("within a transaction", _rewriting, after(PackWriter, "add"), _unregistered),
        ("between two", _rewriting, before(training, "_rewrite", 2), dead(200)),
        ("after the last", _rewriting, after(training, "_rewrite", 2), dead(250)),
    )
]
WINDOWS += [
    Window("Removing dictionaries", *row)
    for row in (
        (
            "between the copies of one",
            _removing,
            after(dictionaries, "_unlink"),
            copies_of_it(1, chosen=False),
        ),
        (
            "after the last",
            _removing,
            after(dictionary_repair, "remove_unneeded"),
            copies_of_it(0, chosen=False),
        ),
    )
]
