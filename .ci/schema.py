"""Are the migrations in step with the tables, can they be undone, and are they safe? Part of `make check`."""

import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import anyio

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpustackd.store.embedded import EmbeddedPostgres
from gpustackd.store.postgres import migrate
from tests.schema import difference
from tests.servers import QUICK


def in_step(url: str) -> bool:
    anyio.run(migrate.migrate, url)
    if differences := anyio.run(migrate.on_connection, url, difference):
        print("the tables and the migrations disagree:", *differences, sep="\n  ", file=sys.stderr)
        return False
    return True


def reversible(url: str) -> bool:
    """Down to nothing and up again, ending in the same schema."""
    anyio.run(migrate.migrate, url, "base")
    return in_step(url)


# version_num is Alembic's own column; a step may take long, but never wait long for a lock
ACCEPTED = ["prefer-text-field", "require-statement-timeout"]


def safe() -> bool:
    """What squawk says of the statements, sent as `gpustackd migrate` sends them: with a lock timeout."""
    statements = f"SET lock_timeout = '{migrate.LOCK_TIMEOUT}';\n{migrate.sql()}"
    squawk = Path(sys.executable).with_name("squawk")
    command = [
        str(squawk),
        "--exclude",
        ",".join(ACCEPTED),
        "--pg-version",
        "15",
        "--stdin-filepath",
        "migrations.sql",
    ]
    result = subprocess.run(command, input=statements, capture_output=True, text=True, check=False)
    if result.returncode:
        print(result.stdout, result.stderr, sep="\n", file=sys.stderr)
    return result.returncode == 0


def main() -> int:
    with (
        tempfile.TemporaryDirectory(prefix="gpustackd-check-") as folder,
        EmbeddedPostgres(folder, settings=QUICK, report=lambda _: None) as server,
    ):
        held = [
            check() for check in (partial(in_step, server.url()), partial(reversible, server.url()), safe)
        ]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
