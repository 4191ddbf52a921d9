"""`castore remote`: keeps, lists, checks and forgets remotes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from castore.cli.completion import remotes
from castore.cli.exit_codes import FAILED
from castore.cli.output import AsJson, growing_progress, plural, print_error, print_json, print_table
from castore.cli.remote_access import format_local
from castore.cli.std_streams import need_output
from castore.cli.store_access import check_text, open_store
from castore.errors import CorruptError, RemoteDeniedError, RemoteError, RemoteUnreachableError
from castore.units import format_size

if TYPE_CHECKING:
    from castore import RemoteProblem, Store
    from castore.remote.outcomes import Checked
    from castore.remote.remote import Remote

remote = typer.Typer(add_completion=False, rich_markup_mode=None)

Name = Annotated[
    str, typer.Argument(metavar="NAME", autocompletion=remotes, help="The remote's name in this store.")
]

#: Where the results of steps of datasets lie.
_STEPS = ".datasets/blocks"


@remote.callback()
def _remote() -> None:
    """Keep, list, check and forget remotes.

    A remote is a place on object storage or on a shared file system that several stores push to and pull
    from.

    \b
    castore remote add team file:///mnt/nfs/castore
    castore remote ls
    """


@remote.command("add")
def add(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name for the remote in this store.")],
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="Where it is: s3://BUCKET/PREFIX, gs://…, az://… or file:///FOLDER."
        ),
    ],
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Never write to it from this store.")
    ] = False,
    single_writer: Annotated[
        bool,
        typer.Option(
            "--single-writer",
            help="For storage without conditional writes: you vouch that only one process pushes at a time.",
        ),
    ] = False,
    requests: Annotated[
        int | None, typer.Option(metavar="N", help="Requests at once, at most.  [default: 16]")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Bytes a second, at most: 50MB.  [default: no bound]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Keep a remote under a name. Makes the place a remote if it is none yet.

    \b
    castore remote add team s3://our-bucket/castore
    castore remote add team file:///mnt/nfs/castore
    """
    check_text(url, "URL")
    with open_store(context) as store:
        store.add_remote(
            name, url, read_only=read_only, single_writer=single_writer, requests=requests, rate=rate
        )
        if as_json:
            print_json(_described(store, name))
        else:
            typer.echo(f"{name} is {url} from now on")


@remote.command("ls")
def ls(context: typer.Context, as_json: AsJson = False) -> None:
    """List the remotes that the store knows.

    \b
    castore remote ls
    """
    need_output()
    with open_store(context) as store:
        known = [_described(store, name) for name in store.remotes()]
    if as_json:
        print_json(known)
        return
    rows = ((str(one["name"]), str(one["url"]), ", ".join(_options(one))) for one in known)
    print_table(("NAME", "URL", "OPTIONS"), rows)


def _options(one: dict[str, Any]) -> Iterator[str]:
    if one["read_only"]:
        yield "read-only"
    if one["single_writer"]:
        yield "single writer"
    if one["requests"]:
        yield f"{one['requests']} requests"
    if one["rate"]:
        yield f"{format_size(one['rate'])}/s"


@remote.command("rm")
def rm(context: typer.Context, name: Name, as_json: AsJson = False) -> None:
    """Forget a remote. Nothing in it changes.

    \b
    castore remote rm team
    """
    with open_store(context) as store:
        store.remove_remote(name)
    if as_json:
        print_json({"removed": name})


@remote.command("stat")
def stat(context: typer.Context, name: Name, as_json: AsJson = False) -> None:
    """Show what is in a remote, with sizes, and what this node has asked of its remotes.

    \b
    castore remote stat team
    """
    need_output()
    with open_store(context) as store:
        found = store.remote(name).usage()
        use = store.stat().remotes
    if as_json:
        node = {
            "requests": use.requests, "dollars": use.dollars, "found": use.found, "offered": use.offered,
            "left_alone": use.left_alone,
        }  # fmt: skip
        print_json(found._asdict() | {"size": found.size, "node": node})
        return
    rows = (
        ("refs", found.refs, ""),
        ("pages and commits", found.trees, format_size(found.trees_size)),
        ("objects", found.objects, format_size(found.objects_size)),
        ("shared results", found.results, format_size(found.results_size)),
        ("in all", sum((found.trees, found.objects, found.results)), format_size(found.size)),
        ("requests of this node", use.requests, f"${use.dollars:.2f}"),
        ("results that it found", use.found, ""),
        ("results that it offered", use.offered, ""),
        ("remotes that it left", use.left_alone, ""),
    )
    print_table(("", "NUMBER", "SIZE"), ((words, f"{number:,}", size) for words, number, size in rows))


@remote.command("results")
def results(
    context: typer.Context,
    name: Name,
    prefix: Annotated[
        str, typer.Argument(metavar="[PREFIX]", help="Keys at and below it.  [default: all]")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List the shared results of computations: their keys, sizes and ages. Reads each of their records.

    \b
    castore remote results team
    castore remote results team features
    """
    need_output()
    with open_store(context) as store, growing_progress("reading", counts=True) as progress:
        found = store.remote(name).results(prefix, progress=progress)
    if as_json:
        print_json([result._asdict() for result in found])
        return
    rows = (
        (
            result.key,
            format_size(result.size),
            format_local(result.created),
            format_local(result.used),
            "never" if result.expires is None else format_local(result.expires),
        )
        for result in found
    )
    print_table(("KEY", "SIZE", "COMPUTED", "LAST USE", "EXPIRES"), rows)


@remote.command("offer")
def offer(
    context: typer.Context,
    name: Name,
    prefix: Annotated[
        str, typer.Argument(metavar="[PREFIX]", help="Keys at and below it.  [default: steps of datasets]")
    ] = _STEPS,
    as_json: AsJson = False,
) -> None:
    """Offer results of this store that a remote lacks: computed while it was away, or before it was added.

    \b
    castore remote offer team
    castore remote offer team features
    """
    with open_store(context, remote=name) as store, growing_progress("offering", counts=True) as progress:
        keys = [entry.name for entry in store.entries(prefix)]
        store.offer_shared(keys, wait=True, progress=progress)
    if as_json:
        print_json({"offered": len(keys)})
    else:
        typer.echo(f"in {name} now: {plural(len(keys), 'result')} at and below {prefix}")


@remote.command("forget")
def forget(
    context: typer.Context,
    name: Name,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Keys of computations.")],
    as_json: AsJson = False,
) -> None:
    """Remove shared results, so that nodes compute them again. Entries in stores stay: see `castore rm`.

    \b
    castore remote forget team features/5f2c
    """
    with open_store(context) as store:
        gone = store.remote(name).forget(*keys)
    if as_json:
        print_json({"forgotten": gone})
    else:
        typer.echo(f"{plural(gone, 'result')} forgotten")
    if gone < len(keys):
        print_error(f"{plural(len(keys) - gone, 'key')} had no result in {name}")
        raise typer.Exit(FAILED)


def _described(store: Store, name: str) -> dict[str, Any]:
    return store.remote(name).settings._asdict()


@remote.command("check")
def check(
    context: typer.Context,
    name: Name,
    deep: Annotated[bool, typer.Option("--deep", help="Read every object, and compare its bytes.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Upload what is missing, as far as this store has it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check that a remote has all that its refs mean. Exits with 1 if something is missing or damaged.

    Also tries out what the storage can do, as `castore remote add` does, and warns.

    \b
    castore remote check team
    castore remote check team --deep --repair
    """
    with open_store(context) as store:
        found = _check(store.remote(name), deep)
        is_whole = not found.problems
        repaired: set[str] = set()
        failure: CorruptError | RemoteError | None = None
        if repair:
            found, repaired, failure = _repair(store.remote(name), found, deep)
    for sentence in (*found.warnings, *([str(failure)] if failure else ())):
        print_error(f"remote {name!r}: {sentence}")
    if as_json:
        lists = {"problems": found.problems, "history": found.history}
        described = {key: [one._asdict() for one in some] for key, some in lists.items()}
        print_json(found._asdict() | described | {"repaired": sorted(repaired)})
    else:
        for key in sorted(repaired):
            typer.echo(f"{key}: repaired")
        for problem in (*found.problems, *found.history):
            typer.echo(_describe_problem(problem))
        orphans = ""
        if found.orphans and found.orphaned is not None:
            orphans = f"; {plural(found.orphans, 'object')} of no ref: {format_size(found.orphaned)}"
        typer.echo(
            f"{plural(len(found.refs), 'ref')}, {plural(found.objects, 'object')},"
            f" {plural(len(found.problems), 'problem')}{orphans}"
        )
        if found.history:
            typer.echo(
                f"{plural(len(found.history), 'object')} that only older commits need cannot be had: `castore"
                f" remote gc {name} --keep-commits N` ends the history before them"
            )
        if repair and is_whole and not deep:
            typer.echo("no bytes were read: with --deep damaged ones are found and uploaded again, too")
    if found.problems or found.history or failure:
        raise typer.Exit(FAILED)


def _repair(
    remote: Remote, found: Checked, deep: bool
) -> tuple[Checked, set[str], CorruptError | RemoteError | None]:
    """Upload what is missing; returns what is found then, the keys that are back, and why others are not."""
    from castore.remote.keys import COMMITS

    repaired: set[str] = set()
    failure: CorruptError | RemoteError | None = None
    while found.problems:
        before = {problem.key for problem in found.problems}
        try:
            with growing_progress("uploading") as progress:
                remote.repair(found, progress=progress)
        except (RemoteDeniedError, RemoteUnreachableError):
            raise
        except (CorruptError, RemoteError) as error:
            failure = error
        found = _check(remote, deep)
        now = {problem.key for problem in found.problems}
        repaired = (repaired | before) - now
        # With a commit that is back the one before it can be found.
        if failure or not (before - now and any(key.startswith(COMMITS) for key in now)):
            break
    return found, repaired, failure


def _check(remote: Remote, deep: bool) -> Checked:
    with growing_progress("reading" if deep else "checking") as progress:
        return remote.check(deep=deep, progress=progress)


@remote.command("gc")
def gc(
    context: typer.Context,
    name: Name,
    keep_commits: Annotated[
        int | None,
        typer.Option(metavar="N", help="Keep the newest N commits of each ref.  [default: all]"),
    ] = None,
    grace: Annotated[
        str, typer.Option(metavar="TIME", help="How long garbage stays, and commits that were newest.")
    ] = "1d",
    unused: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Delete shared results that no node has used for so long.  [default: keep them]",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing; say what is garbage.")] = False,
    as_json: AsJson = False,
) -> None:
    """Delete what no ref of a remote needs. Garbage is condemned first, and deleted by a run a day later.

    \b
    castore remote gc team --dry-run
    castore remote gc team --keep-commits 10 --unused 30d
    """
    with open_store(context) as store, growing_progress("deleting") as progress:
        done = store.remote(name).gc(
            keep_commits=keep_commits, grace=grace, unused=unused, dry_run=dry_run, progress=progress
        )
    if as_json:
        print_json(done._asdict())
        return
    if done.deleted:
        typer.echo(f"deleted {plural(done.deleted, 'object')}: {format_size(done.freed)} freed")
    garbage = f"{plural(done.condemned, 'object')} of no use: {format_size(done.size)}"
    if done.until is None:
        none = f"there is no garbage that is older than {grace}"
        typer.echo(f"garbage: {garbage}" if done.condemned else none)
    else:
        typer.echo(f"condemned {garbage}; a run after {format_local(done.until)} deletes them")


def _describe_problem(problem: RemoteProblem) -> str:
    names = f", needed by {', '.join(problem.names)}" if problem.names else ""
    return f"{problem.ref}: {problem.key}: {problem.why}{names}"
