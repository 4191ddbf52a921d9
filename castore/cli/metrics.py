"""A store's figures in Prometheus' text exposition format.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/. Names follow its advice: base units,
`_total` for counters. Each sample has the store's path as a label, so that one server can collect the files
of several stores.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from castore.stats import Stat


def exposition(stat: Stat) -> str:
    """The text that a scrape of this store would get."""
    store = stat.path.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines = []
    for name, kind, words, samples in _metrics(stat):
        lines += [f"# HELP castore_{name} {words}", f"# TYPE castore_{name} {kind}"]
        for labels, value in samples.items():
            lines.append(f'castore_{name}{{store="{store}"{labels}}} {value}')
    return "\n".join(lines) + "\n"


def _metrics(stat: Stat) -> Iterator[tuple[str, str, str, Mapping[str, float]]]:
    """Name, type, help, and samples by their other labels."""
    yield "entries", "gauge", "Entries.", {"": stat.entries}
    yield (
        "expired_entries",
        "gauge",
        "Entries whose time is over and that gc has yet to remove.",
        {"": stat.expired},
    )
    yield "blobs", "gauge", "Blobs.", {"": stat.blobs}
    yield "logical_bytes", "gauge", "Sizes of all entries added up.", {"": stat.logical}
    yield "unique_bytes", "gauge", "Sizes of all blobs added up.", {"": stat.unique}
    yield "stored_bytes", "gauge", "Bytes that the blobs take as stored.", {"": stat.stored}
    if stat.max_size is not None:
        yield "max_size_bytes", "gauge", "Budget on the stored bytes.", {"": stat.max_size}
    hits = {',tier="memory"': stat.memory_hits, ',tier="disk"': stat.disk_hits}
    yield "hits_total", "counter", "Reads that found what they asked for.", hits
    yield "misses_total", "counter", "Reads that did not.", {"": stat.misses}
    yield "corrupt_total", "counter", "Blobs that were found damaged or missing.", {"": stat.corrupt}
    yield "evictions_total", "counter", "Entries that gc removed.", {"": stat.evictions}
    yield "mounts", "gauge", "Live mounts.", {"": len(stat.mounts)}
    yield "away_blobs", "gauge", "Blobs whose bytes are only in remotes.", {"": stat.away.blobs}
    yield "away_bytes", "gauge", "Their bytes as stored in the remotes.", {"": stat.away.stored}
    remotes = stat.remotes
    requests = {
        ',kind="read"': remotes.reads,
        ',kind="write"': remotes.writes,
        ',kind="list"': remotes.lists,
        ',kind="delete"': remotes.deletes,
    }
    yield "remote_requests_total", "counter", "Requests to remotes.", requests
    sizes = {',direction="in"': remotes.received, ',direction="out"': remotes.sent}
    yield "remote_bytes_total", "counter", "Bytes from and to remotes.", sizes
    yield "remote_errors_total", "counter", "Requests to remotes that failed.", {"": remotes.errors}
    yield "remote_retries_total", "counter", "Further tries of requests to remotes.", {"": remotes.retries}
    results = {',kind="found"': remotes.found, ',kind="offered"': remotes.offered}
    yield "remote_results_total", "counter", "Results of computations from and to remotes.", results
    yield (
        "remote_left_alone_total",
        "counter",
        "Times a remote was not asked for a minute.",
        {"": remotes.left_alone},
    )
    yield "remote_request_seconds_total", "counter", "Time of all requests added up.", {"": remotes.seconds}
