"""An embedded PostgreSQL: a child process with its data in one folder, which ends with its parent.

`EmbeddedPostgres` is for the demo, the tests and small installations (`gpustackd run --embedded DIR`). The
binaries come from the `embedded` extra, or from any folder with `initdb` and `postgres`.
"""

from gpustackd.store.embedded.binaries import Binaries, EmbeddedPostgresFailed, find_binaries
from gpustackd.store.embedded.server import AlreadyRunning, EmbeddedPostgres

__all__ = [
    "AlreadyRunning",
    "Binaries",
    "EmbeddedPostgres",
    "EmbeddedPostgresFailed",
    "find_binaries",
]
