"""`castore stat`: the store, or one entry, for people, for scripts and for Prometheus."""

from __future__ import annotations

import time
from typing import Annotated, Any

import typer

from castore import Store
from castore.cli.completion import names
from castore.cli.output import AsJson, json_text, print_json
from castore.cli.std_streams import need_output
from castore.cli.store_access import find_blob, find_entry, open_store
from castore.records import AWAY
from castore.units import format_duration, format_size


def stat(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", autocompletion=names, help="A name or a digest.")
    ] = None,
    prometheus: Annotated[
        bool, typer.Option("--prometheus", help="Print metrics in Prometheus' text format.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show figures of the store, or one entry.

    \b
    castore stat
    castore stat imagenet/train-00001.tar
    castore stat --prometheus > /var/lib/node_exporter/castore.prom
    """
    if prometheus and (name or as_json):
        raise typer.BadParameter("--prometheus shows the whole store, and in its own format only")
    need_output()
    with open_store(context) as store:
        if name is not None:
            _print_one(store, name, as_json)
        elif prometheus:
            from castore.cli.metrics import exposition

            typer.echo(exposition(store.stat()), nl=False)
        elif as_json:
            print_json(_figures(store))
        else:
            from castore.cli.stat_panel import draw

            draw(store.stat(), store.settings)


def _figures(store: Store) -> dict[str, Any]:
    found = store.stat()
    figures: dict[str, Any] = found._asdict()
    # The RAM tier is that of this very process, which has none.
    del figures["memory_bytes"], figures["memory_max"]
    figures["next_expiries"] = [{"name": name, "expires": when} for name, when in found.next_expiries]
    figures["prefixes"] = None if found.prefixes is None else [prefix._asdict() for prefix in found.prefixes]
    figures["remotes"] = found.remotes._asdict()
    figures["away"] = found.away._asdict()
    figures["dictionaries"] = [dictionary._asdict() for dictionary in found.dictionaries]
    ratios = {
        "dedupe_ratio": found.dedupe_ratio,
        "compression_ratio": found.compression_ratio,
        "hit_rate": found.hit_rate,
    }
    return figures | {key: round(value, 4) for key, value in ratios.items()}


def _print_one(store: Store, name: str, as_json: bool) -> None:
    entry = find_entry(store, name)
    if entry is None:
        blob = find_blob(store, name)
        digest = blob.digest.hex()
        facts: dict[str, Any] = {
            "digest": digest,
            "size": blob.size,
            "stored": blob.stored,
            "codec": blob.codec,
            "names": store.names_of(blob.digest),
        }
        is_away = blob.pack == AWAY
    else:
        facts, is_away = entry._asdict(), entry.away
    if is_away:
        facts |= _describe_away(store, facts["digest"])
    if as_json:
        print_json(facts)
        return
    for key, value in facts.items():
        typer.echo(f"{key:<10}  {_format_value(key, value)}".rstrip())


def _describe_away(store: Store, digest: str) -> dict[str, Any]:
    """The remote that has a blob, and its stored bytes that are there, and of them here."""
    found = store.source.describe_away(bytes.fromhex(digest))
    if not found:  # its bytes have come, or gone, meanwhile
        return {}
    return {"remote": found["remote"], "there": int(found["stored"]), "here": int(found["here"])}


def _format_value(key: str, value: Any) -> str:
    if key in ("size", "stored", "there", "here"):
        return f"{format_size(value)} ({value:,} bytes)" if value >= 1000 else format_size(value)
    if key in ("created", "accessed", "expires"):
        return "never" if value is None else _format_time(value)
    if key in ("pinned", "away"):
        return "yes" if value else "no"
    if key == "metadata":
        return ", ".join(f"{name}={_format_content(content)}" for name, content in value.items())
    return ", ".join(value) if isinstance(value, list) else str(value)


def _format_content(value: Any) -> str:
    return value if isinstance(value, str) else json_text(value)


def _format_time(moment: float) -> str:
    away = moment - time.time()
    relative = f"in {format_duration(away)}" if away > 0 else f"{format_duration(round(-away))} ago"
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(moment))} ({relative})"
