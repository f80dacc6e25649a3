"""`gpustackd audit`: recompute every rule of the tables."""

from __future__ import annotations

import anyio
import typer

from gpustackd.cli.options import ConfigOption, DatabaseOption, Form, FormOption, database
from gpustackd.cli.output import console, print_json, print_table

_COUNTED = {"gpus": "GPUs", "over_committed": "over-committed"}


def audit(
    output: FormOption = Form.TEXT, config: ConfigOption = None, database_url: DatabaseOption = None
) -> None:
    """Recompute every rule that the tables must hold.

    In one snapshot. Exit 1 where a rule is broken.

    Example: gpustackd audit -o json
    """
    from gpustackd.store.audit import audit as store_audit
    from gpustackd.store.audit.rules import TITLES
    from gpustackd.store.postgres.connect import connected

    url = database(config, database_url)

    async def run() -> store_audit.AuditReport:
        async with connected(url, "gpustackd audit") as connection:
            return await store_audit.audit(connection)

    result = anyio.run(run)
    if output is Form.JSON:
        breaches = [{"rule": b.rule, "what": b.what, "how": b.how} for b in result.breaches]
        print_json({"clean": result.clean, "breaches": breaches, "counts": result.counts})
    else:
        out = console()
        broken = {n: sum(b.rule == n for b in result.breaches) for n in TITLES}
        rows = [(n, title, _outcome(broken[n])) for n, title in TITLES.items()]
        print_table(out, ["RULE", "WHAT MUST HOLD", "FOUND"], rows, right=["RULE"])
        if result.breaches:
            out.print()
            print_table(out, ["RULE", "WHERE", "HOW"], [(b.rule, b.what, b.how) for b in result.breaches])
        out.print("\n" + ", ".join(f"{n} {_COUNTED.get(name, name)}" for name, n in result.counts.items()))
    if not result.clean:
        raise typer.Exit(1)


def _outcome(breaches: int) -> str:
    return {0: "holds", 1: "broken once"}.get(breaches, f"broken {breaches} times")
