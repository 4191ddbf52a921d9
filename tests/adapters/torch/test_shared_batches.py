"""SharedBatches gives the batches that a loader gives without it, and never writes to one that is in use."""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import traceback
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import multiprocessing as multiprocessing_in_torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torch.utils.data._utils import worker
from torch.utils.data._utils.collate import default_collate_fn_map
from torchdata.stateful_dataloader import StatefulDataLoader

from castore.adapters.torch import SharedBatches, collate
from castore.errors import InvalidValueError, SegmentError
from tests.helpers import LONG

Point = namedtuple("Point", "x y")
#: Rows of a batch: with 8 KiB a sample it does not fit into a message.
ROWS = 4


class Numbers(Dataset[torch.Tensor]):
    """Samples of 8 KiB, each full of its number."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2048,), index, dtype=torch.int32)


def loader(count: int, workers: int = 2, batches: SharedBatches | None = None, **options: Any) -> Any:
    collate_fn = SharedBatches() if batches is None else batches
    return DataLoader(Numbers(count), batch_size=ROWS, num_workers=workers, collate_fn=collate_fn, **options)


def numbers(batch: torch.Tensor) -> list[int]:
    """The number of each row, if each is full of one."""
    assert (batch == batch[:, :1]).all()
    return batch[:, 0].tolist()


def rows_of(batches: Iterable[torch.Tensor]) -> list[int]:
    return [number for batch in batches for number in numbers(batch)]


def files(process: int | str = "self") -> int:
    """How many buffers a process has mapped, beside garbage."""
    gc.collect()
    with open(f"/proc/{process}/maps") as maps:
        return sum("castore-buffer" in line for line in maps)


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_every_epoch_has_all_rows(context: str) -> None:
    for is_persistent in (True, False):
        made = loader(41, multiprocessing_context=context, persistent_workers=is_persistent)
        for _ in range(2):
            assert rows_of(made) == list(range(41))


def test_buffers_are_used_again_and_no_more_than_are_in_flight() -> None:
    before = files()
    made = loader(400, persistent_workers=True)
    for batch in made:
        numbers(batch)
    used = files() - before
    assert 0 < used <= 2 * (2 + 2)  # of each of the two workers: two batches ahead, one read, one being made
    for _ in range(3):
        for batch in made:
            assert not batch.is_shared()
    assert files() - before <= 2 * (2 + 2)


def test_batches_that_are_kept_are_not_written_to() -> None:
    made = loader(200, persistent_workers=True)
    kept = list(made)
    rows = [batch[1] for batch in made]  # of a second epoch: a view keeps its batch
    arrays = [batch.numpy() for batch in made]
    assert rows_of(kept) == list(range(200))
    assert [int(row[7]) for row in rows] == list(range(1, 200, ROWS))
    assert [int(array[0, 0]) for array in arrays] == list(range(0, 200, ROWS))


def test_a_batch_can_be_written_to() -> None:
    for number, batch in enumerate(loader(80)):
        assert numbers(batch)[0] == number * ROWS
        batch.fill_(-1)
        batch[0, 0] = 7


def test_memory_goes_with_the_workers_and_the_last_batch() -> None:
    before = files()
    made = loader(40)
    for batch in made:
        numbers(batch)
    assert files() > before
    del batch
    assert files() <= before


def test_buffers_that_are_needed_no_longer_are_closed() -> None:
    before = files()
    made = loader(800, workers=1, persistent_workers=True)
    kept = list(made)
    assert files() - before > len(kept) // 2
    del kept
    for batch in made:
        numbers(batch)
    assert files() - before < 10
    assert files(made._iterator._workers[0].pid) < before + 10  # forked, it has the buffers of its parent


def fork(work: Callable[[], object]) -> int:
    """Have a forked child do something, and end with 0 if it could; returns its PID."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:  # whatever it is, pytest must not go on in two processes
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def test_a_forked_child_may_go_on_reading_a_batch() -> None:
    """Memory of a batch that a child has inherited is not written to, though its parent has let it go."""
    made = iter(loader(400, persistent_workers=True))
    held = [next(made)]
    waits, go = os.pipe()

    def work() -> None:
        os.close(go)
        os.read(waits, 1)
        assert numbers(held[0]) == [0, 1, 2, 3]

    child = fork(work)
    held.clear()
    for other in made:
        numbers(other)
    os.close(go)
    assert os.waitpid(child, 0) == (child, 0)
    os.close(waits)


def test_an_epoch_that_is_broken_off_loses_no_buffer_for_good() -> None:
    before = files()
    made = loader(400, persistent_workers=True)
    for _ in range(10):
        for number, batch in enumerate(made):
            assert numbers(batch)[0] == number * ROWS
            if number == 5:
                break
    assert files() - before <= 2 * (2 + 2 + 2)


def test_a_worker_that_is_killed_leaves_what_was_read() -> None:
    def work() -> None:
        made = iter(loader(400, persistent_workers=True))
        kept = [next(made) for _ in range(6)]
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error wherever this stands
        for process in multiprocessing.active_children():
            process.kill()
        with pytest.raises((RuntimeError, OSError, EOFError)):
            rows_of(made)
        assert rows_of(kept) == list(range(24))

    # In a process of its own: torch raises its error wherever the next child of a process ends.
    child = fork(work)
    assert os.waitpid(child, 0) == (child, 0)


@dataclasses.dataclass
class Sized:
    tensor: torch.Tensor
    sizes: list[int]


def _structures() -> dict[str, Callable[[int], Any]]:
    image = torch.arange(4800.0).view(3, 40, 40)
    return {
        "dict": lambda n: {"image": image * n, "label": n, "name": f"n{n}", "box": torch.tensor([n, 1.5])},
        "tuple": lambda n: (image * n, n, (image[0] + n, f"{n}")),
        "named tuple": lambda n: Point(image * n, n),
        "ordered": lambda n: OrderedDict(b=image * n, a=float(n)),
        "array": lambda n: np.full((30, 40), n, np.float64),
        "small": torch.tensor,
        "empty": lambda n: torch.empty(0, 3),
        "scalars": np.float32,
        "bytes": lambda n: (bytes(5000), image),
        "scalar tensors in lists": lambda n: [torch.tensor(n), torch.tensor(2.0 * n)],
    }


class Made(Dataset[Any]):
    """Samples of a kind, by its name."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return _structures()[self.kind](index)


def same(one: Any, other: Any) -> bool:
    """Whether two batches are equal in values, types, dtypes, shapes and strides."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        return torch.equal(
            one.contiguous().view(-1).view(torch.uint8), other.contiguous().view(-1).view(torch.uint8)
        )
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("kind", _structures())
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_torch(kind: str, workers: int) -> None:
    plain = list(DataLoader(Made(kind), batch_size=3, num_workers=workers))
    made = list(DataLoader(Made(kind), batch_size=3, num_workers=workers, collate_fn=SharedBatches()))
    assert same(plain, made)


_DTYPES = [
    *(
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.uint16,
        torch.int16,
        torch.uint32,
        torch.int32,
        torch.uint64,
    ),
    *(torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex32),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2),
]
_OTHERS: dict[str, Callable[[], Any]] = {
    "transposed": lambda: torch.rand(60, 70).t(),
    "channels last": lambda: torch.rand(2, 3, 20, 30).to(memory_format=torch.channels_last),
    "every other": lambda: torch.arange(10_000)[::2],
    "part of a large one": lambda: torch.arange(100_000)[500:2000],
    "expanded": lambda: torch.rand(40, 1).expand(40, 500),
    "small and transposed": lambda: torch.rand(3, 2).t(),
    "no dimensions": lambda: torch.tensor(5),
    "conjugate": lambda: torch.randn(2000, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(2000, dtype=torch.complex64).conj().imag,
    "sparse": lambda: torch.eye(200).to_sparse(),
    "parameter": lambda: torch.nn.Parameter(torch.rand(3000), requires_grad=False),
    "needs a gradient": lambda: torch.rand(3000, requires_grad=True),
}


def _batch_of_all() -> dict[str, Any]:
    torch.manual_seed(5)
    batch: dict[str, Any] = {name: make() for name, make in _OTHERS.items()}
    for dtype in _DTYPES:
        raw = torch.randint(0, 2, (8192 * dtype.itemsize,), dtype=torch.uint8)
        batch[str(dtype)] = raw.view(dtype)
    batch["dataclass"] = Sized(torch.arange(4000), [1])
    batch["numpy"] = np.arange(3000)
    return batch


class WholeBatch(Dataset[Any]):
    def __len__(self) -> int:
        return 1

    def __getitems__(self, indices: list[int]) -> Any:
        return _batch_of_all()

    def __getitem__(self, index: int) -> Any:
        return _batch_of_all()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_tensors_of_every_kind_arrive_as_they_were() -> None:
    [made] = DataLoader(WholeBatch(), num_workers=1, collate_fn=SharedBatches())
    given = _batch_of_all()
    assert list(made) == list(given)
    for name, value in given.items():
        if name == "dataclass":
            assert same(made[name].tensor, value.tensor)
        elif name == "numpy":
            assert (made[name] == value).all()
        elif value.layout is not torch.strided:
            assert torch.equal(made[name].to_dense(), value.to_dense())
        else:
            assert type(made[name]) is type(value)
            assert made[name].requires_grad == value.requires_grad
            assert made[name].shape == value.shape
            assert made[name].dtype == value.dtype
            one, other = made[name].detach().resolve_conj(), value.detach().resolve_conj()
            assert torch.equal(one.resolve_neg().contiguous().view(-1).view(torch.uint8),
                               other.resolve_neg().contiguous().view(-1).view(torch.uint8))  # fmt: skip
    assert made["channels last"].is_contiguous(memory_format=torch.channels_last)
    assert made["transposed"].stride() == given["transposed"].stride()


def _ragged(samples: list[torch.Tensor]) -> dict[str, Any]:
    """Pads to a length that is another one each time, and has one tensor twice."""
    length = 2048 + 1000 * int(samples[0][0] % 3)
    padded = torch.zeros(len(samples), length, dtype=torch.int32)
    padded[:, :2048] = torch.stack(samples)
    return {"rows": padded, "again": padded, "few": padded[:, 0].clone()}


def test_a_collate_function_of_ones_own_is_kept() -> None:
    before = files()
    made = loader(120, batches=SharedBatches(_ragged), persistent_workers=True)
    for _ in range(3):
        for number, batch in enumerate(made):
            expected = list(range(number * ROWS, number * ROWS + ROWS))
            assert batch["again"] is batch["rows"]
            assert numbers(batch["rows"][:, :2048]) == batch["few"].tolist() == expected
            assert not batch["rows"][:, 2048:].any()
    assert files() - before < 40


def _fails(samples: list[torch.Tensor]) -> torch.Tensor:
    if int(samples[0][0]) == 8:
        raise ValueError("row 8")
    return torch.stack(samples)


class _NotPicklable(torch.nn.Module):
    def __reduce__(self) -> Any:
        raise TypeError("this stays here")


def _cannot_travel(samples: list[torch.Tensor]) -> Any:
    return {"rows": torch.stack(samples), "module": _NotPicklable()}


def test_errors_are_those_of_the_collate_function() -> None:
    made = iter(loader(40, batches=SharedBatches(_fails), workers=1))
    assert [numbers(next(made))[0] for _ in range(2)] == [0, 4]
    with pytest.raises(ValueError, match="row 8"):
        next(made)
    assert numbers(next(made))[0] == 12


def test_a_batch_that_cannot_be_pickled_is_an_error_and_no_silence() -> None:
    with pytest.raises(TypeError, match="this stays here"):
        next(iter(loader(40, batches=SharedBatches(_cannot_travel), workers=1)))


def test_samples_of_several_shapes_have_the_error_of_torch() -> None:
    class Ragged(Numbers):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.zeros(2048 + index)

    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        next(iter(DataLoader(Ragged(8), batch_size=4, num_workers=1, collate_fn=SharedBatches())))


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        for index in range(info.id, 60, info.num_workers):
            yield Numbers(60)[index]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_iterable_datasets_and_stateful_loaders() -> None:
    made = DataLoader(Stream(), batch_size=ROWS, num_workers=2, collate_fn=SharedBatches())
    assert sorted(rows_of(made)) == list(range(60))
    first = StatefulDataLoader(Numbers(60), batch_size=ROWS, num_workers=2, collate_fn=SharedBatches())
    running = iter(first)
    assert numbers(next(running)) == [0, 1, 2, 3]
    state = first.state_dict()
    second = StatefulDataLoader(Numbers(60), batch_size=ROWS, num_workers=2, collate_fn=SharedBatches())
    second.load_state_dict(state)
    assert rows_of(second) == list(range(4, 60))


def test_two_loaders_may_share_one() -> None:
    batches = SharedBatches()
    one, two = loader(200, batches=batches), loader(120, batches=batches)
    for _ in range(2):
        pairs = [(numbers(left)[0], numbers(right)[0]) for left, right in zip(one, two, strict=False)]
        assert pairs == [(number, number) for number in range(0, 120, ROWS)]


def test_a_batch_may_go_on_to_another_process() -> None:
    context = multiprocessing.get_context("fork")
    queue, answers = context.SimpleQueue(), context.SimpleQueue()

    def work() -> None:
        for _ in range(10):
            answers.put(numbers(queue.get()))

    child = context.Process(target=work)
    child.start()
    for batch in loader(40):
        queue.put(batch)
        del batch
    assert [number for _ in range(10) for number in answers.get()] == list(range(40))
    child.join()


def test_what_is_received_twice_is_an_error() -> None:
    """Two tensors in one buffer would let the worker write to the second when the first is gone."""
    batches = SharedBatches()
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    go = context.Semaphore(0)

    def work() -> None:
        torch.set_num_threads(1)
        info = worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=Numbers(9))
        worker._worker_info = info
        for _ in range(2):
            there.send_bytes(ForkingPickler.dumps(batches([Numbers(9)[index] for index in range(4)])))
            go.acquire()

    child = context.Process(target=work)
    child.start()
    assert numbers(ForkingPickler.loads(here.recv_bytes())) == [0, 1, 2, 3]
    go.release()
    data = here.recv_bytes()
    kept = ForkingPickler.loads(data)
    with pytest.raises(SegmentError, match="received twice"):
        ForkingPickler.loads(data)
    assert numbers(kept) == [0, 1, 2, 3]
    go.release()
    child.join()


@pytest.mark.parametrize("collate_fn", [5, "stack", [torch.stack]])
def test_a_collate_function_that_cannot_be_called_is_refused(collate_fn: Any) -> None:
    with pytest.raises(InvalidValueError, match="collate_fn is a function"):
        SharedBatches(collate_fn)


def test_without_workers_nothing_is_changed() -> None:
    batches = SharedBatches()
    batch = batches([torch.zeros(3000), torch.ones(3000)])
    assert same(batch, collate([torch.zeros(3000), torch.ones(3000)]))
    assert batches({"whole": 1}) == {"whole": 1}
    assert repr(batches) == "SharedBatches()"


def test_a_child_that_another_thread_forks_may_go_on_reading() -> None:
    """Regression: handlers of other libraries ran between castore's own and the fork, while batches came."""
    script = Path(__file__).with_name("forks_beside_batches.py")
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=140, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def _many(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {str(number): torch.stack(samples) + number for number in range(60)}


@pytest.mark.parametrize("is_open", [0, 300])
@pytest.mark.parametrize("more", [60, 300])
def test_batches_of_many_tensors_come_where_few_files_may_be_open(more: int, is_open: int) -> None:
    def work() -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        for _ in range(is_open):
            os.open("/dev/null", os.O_RDONLY)
        most = len(os.listdir("/proc/self/fd")) + more
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        multiprocessing_in_torch.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
        kept = list(loader(48, batches=SharedBatches(_many)))
        rows = [number for batch in kept for number in numbers(batch["7"])]
        assert rows == list(range(7, 55))

    child = fork(work)
    assert os.waitpid(child, 0) == (child, 0)


class Nested(Numbers):
    """A dataset that reads its samples with a loader of its own."""

    def __getitem__(self, index: int) -> torch.Tensor:
        data: Any = [super().__getitem__(index)]
        batches: list[torch.Tensor] = list(DataLoader(data, collate_fn=SharedBatches()))
        return batches[0][0]


def test_a_loader_inside_a_worker_gives_plain_batches() -> None:
    made = DataLoader(Nested(20), batch_size=ROWS, num_workers=2, collate_fn=SharedBatches())
    assert rows_of(made) == list(range(20))


def _divide(samples: list[torch.Tensor]) -> Any:
    return _shared(samples)[0]


_shared = SharedBatches()


def test_a_function_around_it_is_told_to_go_inside() -> None:
    with pytest.raises(TypeError, match=r"goes inside: SharedBatches\(my_collate\)"):
        next(iter(DataLoader(Numbers(8), batch_size=4, num_workers=1, collate_fn=_divide)))


def _pad(samples: list[torch.Tensor], *, collate_fn_map: Any = None) -> torch.Tensor:
    padded: torch.Tensor = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)
    return padded + 100


def test_functions_that_are_registered_with_torch_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(default_collate_fn_map, torch.Tensor, _pad)
    assert rows_of(loader(20)) == list(range(100, 120))


def test_sparse_samples_have_the_error_of_torch() -> None:
    data: Any = [torch.eye(40).to_sparse() for _ in range(8)]
    with pytest.raises(RuntimeError, match="default collate_fn"):
        next(iter(DataLoader(data, batch_size=4, num_workers=1, collate_fn=SharedBatches())))


def _every_other_cannot_travel(samples: list[torch.Tensor]) -> Any:
    batch = {"rows": torch.stack(samples)}
    return batch if int(samples[0][0]) % (2 * ROWS) else {**batch, "module": _NotPicklable()}


def test_batches_that_cannot_be_pickled_leave_no_memory_behind() -> None:
    before = files()
    made = loader(400, workers=1, batches=SharedBatches(_every_other_cannot_travel), persistent_workers=True)
    for _ in range(2):
        running = iter(made)
        errors = 0
        while True:
            try:
                next(running)
            except StopIteration:
                break
            except TypeError:
                errors += 1
        assert errors == 50
    assert files(made._iterator._workers[0].pid) < before + 40  # of 100; garbage of errors has some


def check(kept: list[tuple[int, torch.Tensor]]) -> None:
    for place, batch in kept:
        assert numbers(batch)[0] == place * ROWS


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(300 if LONG else 2))
def test_batches_that_are_kept_and_let_go_at_random_stay_what_they_were(seed: int) -> None:
    draw = random.Random(seed)
    made = loader(1200, workers=draw.choice([1, 2]), persistent_workers=draw.random() < 0.5,
                  prefetch_factor=draw.choice([1, 2, 5]))  # fmt: skip
    kept: list[tuple[int, torch.Tensor]] = []
    for epoch in range(3):
        for number, batch in enumerate(made):
            kept.append((number, batch if draw.random() < 0.7 else batch[: draw.choice([1, 4])]))
            while len(kept) > draw.choice([1, 3, 40]):
                place, old = kept.pop(draw.randrange(len(kept)))
                assert numbers(old)[0] == place * ROWS
            if draw.random() < 0.02:
                child = fork(partial(check, kept))
                assert os.waitpid(child, 0) == (child, 0)
            if draw.random() < 0.01 and epoch < 2:
                break
    check(kept)
