"""A process that reads epochs of a set of samples over the network, on request.

    python -m tools.bench.network_epochs CONTESTANT SAMPLES WORKERS FOLDER
    python -m tools.bench.network_epochs pack CONTESTANT SOURCE TARGET

The process writes the line "ready" once its libraries are imported. Then it reads numbers from standard
input: for each it reads that many epochs, and answers with the seconds of one epoch. The seconds of the first
epoch include all that the contestant does before it: mount the remote, or open the streamed dataset. FOLDER
is the contestant's alone, and what it keeps lies there. `pack` makes a peer's own format of a folder of
samples.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

#: Bytes of a sample.
SIZE = 20_000
#: Names of the remote, of a node's store, and of the samples in the bucket.
REMOTE, STORE, SAMPLES = "team", "store", "samples"
BUCKET = "s3://bench"
_BATCH, _SEED = 64, 20_26
# Of the peers. Their default is 64 MB, which would make few chunks of this set.
_CHUNK_BYTES = 8 << 20
# Samples that castore shuffles together: about as many as a chunk of the peers has.
_WINDOW = 500


class Files(Dataset[torch.Tensor]):
    """One file a sample."""

    def __init__(self, root: Path, samples: int) -> None:
        self.paths = [f"{root}/{SAMPLES}/{name}" for name in sample_names(samples)]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> torch.Tensor:
        with open(self.paths[index], "rb", buffering=0) as file:
            return _as_tensor(file.read())


def sample_names(samples: int) -> list[str]:
    """The paths that `corpus.small_files` gives to samples."""
    return [f"{number // 500:02}/{number:05}.txt" for number in range(samples)]


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


@contextmanager
def _castore(folder: Path, samples: int, options: dict[str, Any]) -> Iterator[Any]:
    """A mount of the store's remote."""
    import castore_fuse

    with castore_fuse.mounted(folder / STORE, folder / "mnt", remote=REMOTE) as root:
        yield _shuffled(Files(root, samples), options)


@contextmanager
def _castore_local(folder: Path, samples: int, options: dict[str, Any]) -> Iterator[Any]:
    """A mount of a store that has the samples itself."""
    import castore_fuse

    with castore_fuse.mounted(folder / STORE, folder / "mnt") as root:
        yield _shuffled(Files(root, samples), options)


class Names(Dataset[torch.Tensor]):
    """Names of a store, of which a batch is read at once."""

    def __init__(self, store: Path, samples: int) -> None:
        import castore

        self.store = castore.Store(store, memory=0)
        self.names = [f"{SAMPLES}/{name}" for name in sample_names(samples)]

    def __len__(self) -> int:
        return len(self.names)

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        found = self.store.get_many([self.names[index] for index in indices])
        return [_as_tensor(data) for data in found if data is not None]


@contextmanager
def _castore_lazy(folder: Path, samples: int, options: dict[str, Any]) -> Iterator[Any]:
    """A store with the remote's names, and no bytes."""
    import castore

    with castore.Store(folder / STORE) as store:
        store.pull(remote=REMOTE, lazy=True)
    yield _shuffled(Names(folder / STORE, samples), options | _in_shared_batches())


@contextmanager
def _castore_pulled(folder: Path, samples: int, options: dict[str, Any]) -> Iterator[Any]:
    """A store with the remote's names and bytes."""
    import castore

    with castore.Store(folder / STORE) as store:
        store.pull(remote=REMOTE)
    yield _shuffled(Names(folder / STORE, samples), options | _in_shared_batches())


@contextmanager
def _castore_streamed(folder: Path, samples: int, options: dict[str, Any]) -> Iterator[Any]:
    """A store whose names and bytes come while the epoch is read."""
    import castore
    from castore.adapters.torch import WindowSampler

    with castore.Store(folder / STORE, memory=0) as store:
        dataset = Names(folder / STORE, samples)
        pull = store.remote(REMOTE).begin_pull()
        sampler = WindowSampler(store, dataset.names, window=_WINDOW, pull=pull, seed=_SEED)
        yield DataLoader(dataset, sampler=sampler, **options, **_in_shared_batches())


def _in_shared_batches() -> dict[str, Any]:
    from castore.adapters.torch import SharedBatches

    return {"collate_fn": SharedBatches()}


def _shuffled(dataset: Dataset[torch.Tensor], options: dict[str, Any]) -> Any:
    return DataLoader(dataset, shuffle=True, generator=torch.Generator().manual_seed(_SEED), **options)


@contextmanager
def _mosaic(folder: Path, samples: int, options: dict[str, Any]) -> Iterator[Any]:
    streaming = _import_streaming()
    yield DataLoader(
        streaming.StreamingDataset(
            remote=f"{BUCKET}/mosaic", local=str(folder / "local"), batch_size=_BATCH, shuffle=True,
            shuffle_seed=_SEED,
        ),
        collate_fn=_collate_mosaic,
        **options,
    )  # fmt: skip


def _import_streaming() -> Any:
    """mosaicml-streaming, without its sets of pictures.

    These need torchvision, and pip installs one for a GPU, which does not load beside torch's CPU build.
    """
    sys.modules.setdefault("streaming.vision", ModuleType("streaming.vision"))
    import streaming  # type: ignore[import-not-found]

    return streaming


def _collate_mosaic(batch: list[dict[str, bytes]]) -> torch.Tensor:
    return torch.stack([_as_tensor(sample["sample"]) for sample in batch])


@contextmanager
def _litdata(folder: Path, samples: int, options: dict[str, Any]) -> Iterator[Any]:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    # Without it litdata refuses a server without TLS, and it has no option of its own for that.
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"
    storage = {
        "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
        "aws_access_key_id": os.environ["AWS_ACCESS_KEY_ID"],
        "aws_secret_access_key": os.environ["AWS_SECRET_ACCESS_KEY"],
    }
    dataset = StreamingDataset(
        f"{BUCKET}/litdata",
        cache_dir=str(folder / "local"),
        shuffle=True,
        seed=_SEED,
        storage_options=storage,
    )
    yield StreamingDataLoader(dataset, collate_fn=_collate_litdata, **options)


def _collate_litdata(batch: list[bytes]) -> torch.Tensor:
    return torch.stack([_as_tensor(sample) for sample in batch])


def _pack_mosaic(source: Path, target: Path) -> None:
    writer = _import_streaming().MDSWriter
    with writer(
        out=str(target), columns={"sample": "bytes"}, compression="zstd", size_limit=_CHUNK_BYTES
    ) as out:
        for path in sorted(source.rglob("*.txt")):
            out.write({"sample": path.read_bytes()})


def _pack_litdata(source: Path, target: Path) -> None:
    # litdata's own working folders, which otherwise lie in the system's temporary folder.
    os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = str(target.with_name("work"))
    os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = str(target.with_name("work-data"))
    import litdata

    litdata.optimize(
        _read_bytes, [str(path) for path in sorted(source.rglob("*.txt"))], str(target),
        chunk_bytes=_CHUNK_BYTES, compression="zstd", num_workers=1, start_method="fork",
    )  # fmt: skip


def _read_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


CONTESTANTS: dict[str, Callable[[Path, int, dict[str, Any]], Any]] = {
    "castore": _castore,
    "castore-lazy": _castore_lazy,
    "castore-pulled": _castore_pulled,
    "castore-streamed": _castore_streamed,
    "castore-local": _castore_local,
    "mosaic": _mosaic,
    "litdata": _litdata,
}
PACKERS = {"mosaic": _pack_mosaic, "litdata": _pack_litdata}


def main(contestant: str, samples: int, workers: int, folder: Path) -> None:
    # Libraries that print do so to standard error, so that standard output has the answers only.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    _import(contestant)
    options: dict[str, Any] = {"multiprocessing_context": "fork" if workers else None}
    options |= {"batch_size": _BATCH, "num_workers": workers, "persistent_workers": workers > 0}
    with ExitStack() as stack:
        loader = None
        answers.write("ready\n")
        for line in sys.stdin:
            start = time.perf_counter()
            if loader is None:
                loader = stack.enter_context(CONTESTANTS[contestant](folder, samples, options))
            for _ in range(int(line)):
                _read(loader, samples)
            answers.write(f"{(time.perf_counter() - start) / int(line)}\n")
        del loader  # ends its workers, before the mount ends


def _import(contestant: str) -> None:
    if contestant == "mosaic":
        _import_streaming()
    elif contestant == "litdata":
        import litdata  # noqa: F401
    else:
        import castore.adapters.torch
        import castore_fuse

        _ = castore_fuse.mounted, castore.adapters.torch.WindowSampler  # imported on first use


def _read(loader: Any, samples: int) -> None:
    """Read an epoch.

    Raises:
        RuntimeError: samples are missing, or have another size.
    """
    seen = 0
    for batch in loader:
        if batch.shape[1:] != (SIZE,):
            raise RuntimeError(f"samples have the shape {batch.shape[1:]}")
        seen += len(batch)
    if seen != samples:
        raise RuntimeError(f"{seen} of {samples} samples came")


if __name__ == "__main__":
    if sys.argv[1] == "pack":
        PACKERS[sys.argv[2]](Path(sys.argv[3]), Path(sys.argv[4]))
    else:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
