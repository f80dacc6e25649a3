"""A PostgreSQL of one's own: started as a child, its data in one folder, gone when its parent is gone.

`EmbeddedPostgres` is for the demo, the tests and small installations (`gpustackd run --embedded DIR`). The
binaries come from the `embedded` extra or from any folder that holds `initdb` and `postgres`.
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
