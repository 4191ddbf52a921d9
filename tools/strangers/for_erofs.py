"""erofs-utils: `stress.c`, compiled from the checkout, compares a castore mount with the added folder.

It runs over all codecs. Its processes list folders, read pieces and whole files at random places, drop pages
at random, and compare each byte with the folder. Two of its features are switched off from outside: as root
it drops the caches of the whole machine, and between two operations it burns a quarter second of CPU.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from castore import Store
from castore_fuse import mounted
from tools.strangers.recording import record

CODECS = ("zstd", "lz4", "gzip", "none")
PROCESSES, OPERATIONS = 4, 400
SEEDS = (1, 2)
_SECONDS = 900
# The headers declare `geteuid` and `clock` under the names that macros give them. A clock that jumps ends
# every wait.
_SWITCHES = """
unsigned int castore_not_root(void) { return 1; }
long castore_clock(void) { static long now; return now += 1000000; }
"""


def compiled(checkout: Path, folder: Path) -> Path:
    """Compile the program into ``folder``.

    Raises:
        RuntimeError: it does not compile; with the compiler's message.
    """
    program, helper = folder / "stress", folder / "switches.c"
    helper.write_text(_SWITCHES)
    made = subprocess.run(
        ["gcc", "-O1", "-w", f"-I{checkout}/include", "-DHAVE_LINUX_TYPES_H", "-DHAVE_ENDIAN_H",
         "-Dgeteuid=castore_not_root", "-Dclock=castore_clock", "-o", program,
         checkout / "contrib" / "stress.c", helper],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if made.returncode:
        raise RuntimeError(f"stress.c does not compile: {made.stderr}")
    return program


def plant(folder: Path, seed: int, files: int) -> None:
    """A tree of files: empty ones, small ones that are packed, some of several frames, texts and noise."""
    chance = random.Random(seed)
    for number in range(files):
        path = folder / f"a{number % 7}" / f"b{number % 3}" / f"file {number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = chance.choice(
            (0, 1, chance.randrange(5_000), chance.randrange(300_000), chance.randrange(3_000_000))
        )
        text = b"".join(b"%d %d\n" % (number, chance.randrange(50)) for _ in range(2_000))
        path.write_bytes(chance.randbytes(size) if number % 2 else (text * (size // len(text) + 1))[:size])


def cases() -> Iterator[tuple[str, int]]:
    """A codec and a seed for each run."""
    return ((codec, seed) for codec in CODECS for seed in SEEDS)


def stress(program: Path, work: Path, codec: str, seed: int, files: int = 120) -> str:
    """Run the program once; returns the end of its output if it found a difference, else an empty string."""
    plain = work / f"{codec}-{seed}"
    plant(plain, seed, files)
    with Store(work / f"store-{codec}-{seed}", codec=codec) as store:
        for path in sorted(plain.rglob("*")):
            if path.is_file():
                store.put_file(path.relative_to(plain).as_posix(), path)
        with mounted(store) as mountpoint:
            done = subprocess.run(
                [program, f"-p{PROCESSES}", f"-l{OPERATIONS}", f"-s{seed}", mountpoint, plain],
                capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False,
            )  # fmt: skip
    if done.returncode == 0 and "read_f" in done.stdout:
        return ""
    return f"exit code {done.returncode}: {done.stderr[-400:] or done.stdout[-400:]}"


def main(checkout: Path) -> int:
    """Run all cases and record how each ended."""
    work = Path(os.environ["TMPDIR"])
    record(chosen=[f"stress[{codec}-{seed}]" for codec, seed in cases()])
    program = compiled(checkout, work)
    failed = 0
    for codec, seed in cases():
        try:
            why = stress(program, work, codec, seed)
        except subprocess.TimeoutExpired as error:
            why = str(error)
        record(case=f"stress[{codec}-{seed}]", end="failed" if why else "passed", why=why)
        failed += bool(why)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
