"""moto's server on a port of 127.0.0.1, one request at a time.

moto looks whether an object is there, and then writes it: of two requests at once both may be the first. A
real storage decides that in one step, so requests wait for one another here.

    python tests/remote/moto_server.py PORT
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterable
from typing import Any

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

_moto = DomainDispatcherApplication(create_backend_app)
_lock = threading.Lock()


def one_at_a_time(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
    """The application: moto's, under a lock."""
    with _lock:
        return [b"".join(_moto(environ, start_response))]


if __name__ == "__main__":
    run_simple("127.0.0.1", int(sys.argv[1]), one_at_a_time, threaded=True)
