"""Runs the commands of `castore`: finds the command, and turns every error into one line and an exit code.

Imports only the command that runs. Must never show a traceback for an error that a user or a disk can cause.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.main

import castore
from castore import settings
from castore.cli.exit_codes import FAILED, INTERRUPTED, USAGE
from castore.cli.output import describe, print_error, print_warnings
from castore.errors import CastoreError, InvalidNameError, InvalidValueError

#: The commands in the order of `castore --help`, and the module of each.
COMMANDS = {
    "init": "init", "add": "add", "ls": "ls", "cat": "cat", "get": "get", "rm": "rm", "pin": "pin",
    "unpin": "pin", "train-dict": "train_dict", "stat": "stat", "gc": "gc", "verify": "verify",
    "doctor": "doctor", "mount": "mount", "umount": "umount", "watch": "watch", "process": "process",
    "remote": "remote", "push": "push", "pull": "pull", "warm": "warm", "log": "log", "diff": "diff",
}  # fmt: skip

_SETTINGS = {"help_option_names": ["-h", "--help"]}

# Some versions of typer bundle click, others use the package: take the class from typer's errors.
_ClickError: Any = typer.BadParameter.__mro__[2]


class _Commands(MutableMapping[str, Any]):
    """The commands by name, each imported when it is looked up."""

    def __init__(self) -> None:
        self._imported: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._imported:
            module = import_module(f"castore.cli.{COMMANDS[name]}")
            self._imported[name] = _command(name, getattr(module, name.replace("-", "_")))
        return self._imported[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._imported[name] = command

    def __delitem__(self, name: str) -> None:
        del self._imported[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


def _command(name: str, found: Any) -> Any:
    """The command of a module: of its function, or of its `Typer` with sub-commands."""
    if not isinstance(found, typer.Typer):
        alone = typer.Typer(add_completion=False, rich_markup_mode=None)
        alone.command(name, context_settings=_SETTINGS)(found)
        found = alone
    made: Any = typer.main.get_command(found)
    made.name = name
    for command in (made, *getattr(made, "commands", {}).values()):
        for parameter in command.params:
            if parameter.param_type_name == "argument":
                # Newer versions of typer print Python's type, `<list[str]>`, behind each argument.
                parameter.display_type_rich = lambda ctx: None
    return made


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"castore {castore.__version__}")
        raise typer.Exit


def _main(
    store: Annotated[
        str | None,
        typer.Option(
            envvar="CASTORE_DIR", metavar="DIR", help="The store's folder.  [default: ~/.cache/castore]"
        ),
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Keep derived training data once, compressed and verified, and hand it out as plain files.

    \b
    castore add shards/ --as imagenet     put a folder of files into the store
    castore mount /mnt/data               read them back as plain files
    castore stat                          see what that saves
    """


def command() -> Any:
    """The whole command, as typer makes it."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=_SETTINGS)
    app.callback()(_main)
    group = typer.main.get_command(app)
    group.commands = _Commands()  # type: ignore[attr-defined]
    return group


def main(arguments: Sequence[str] | None = None) -> int:
    """See `castore.cli.main.main`."""
    words = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    try:
        with print_warnings():
            code = command().main(args=words, prog_name="castore", standalone_mode=False) or 0
        sys.stdout.flush()
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        code = FAILED  # the reader of our output has closed the pipe
    except _ClickError as error:
        return _print_usage_error(error)
    except (InvalidNameError, InvalidValueError) as error:
        print_error(describe(error))
        return USAGE
    except (CastoreError, OSError, sqlite3.Error) as error:
        print_error(describe(error) + _permission_advice(error))
        return FAILED
    except UnicodeEncodeError as error:
        print_error(f"{error.object!r} is not UTF-8; write it in UTF-8")
        return USAGE
    if code == INTERRUPTED:
        print_error("interrupted")
    return int(code)


def _permission_advice(error: Exception) -> str:
    """Advice for a file of a store that this user may not use: `castore doctor` explains it."""
    if not isinstance(error, PermissionError) or not isinstance(error.filename, str):
        return ""
    return (
        "; `castore doctor` tells more" if settings.enclosing_store(Path(error.filename)) is not None else ""
    )


def _print_usage_error(error: Any) -> int:
    context: Any = getattr(error, "ctx", None)
    line = error.format_message().rstrip(".")
    if getattr(error, "option_name", None) == "--store" and context is not None:
        line = f"--store goes before the command: castore --store DIR {context.info_name}"
    elif context is not None:
        line += f"{' See' if line.endswith('?') else '; see'} `{context.command_path} --help`"
    print_error(line)
    return int(error.exit_code)
