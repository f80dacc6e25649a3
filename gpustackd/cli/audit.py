"""`gpustackd audit`: recompute every rule of the contract from the tables."""

from __future__ import annotations

import anyio
import typer

from gpustackd.cli.options import ConfigOption, DatabaseOption, Form, FormOption, database
from gpustackd.cli.output import console, print_json, print_table


def audit(
    output: FormOption = Form.TEXT, config: ConfigOption = None, database_url: DatabaseOption = None
) -> None:
    """Recompute every rule from the tables.

    In one snapshot; exit 1 where a rule is broken.

    Example: gpustackd audit -o json
    """
    from gpustackd.store.audit.audit import RULES, Audit, audit_on
    from gpustackd.store.postgres.inventory import connected

    url = database(config, database_url)

    async def run() -> Audit:
        async with connected(url, "gpustackd audit") as connection:
            return await audit_on(connection)

    found = anyio.run(run)
    if output is Form.JSON:
        breaches = [{"rule": b.rule, "what": b.what, "how": b.how} for b in found.breaches]
        print_json({"clean": found.clean, "breaches": breaches, "counts": found.counts})
    else:
        shown = console()
        broken = {n: sum(b.rule == n for b in found.breaches) for n, _, _ in RULES}
        rows = [
            (n, words, "holds" if not broken[n] else f"broken {broken[n]} times") for n, words, _ in RULES
        ]
        print_table(shown, ["RULE", "WHAT MUST HOLD", "FOUND"], rows, right=["RULE"])
        if found.breaches:
            shown.print()
            print_table(shown, ["RULE", "WHERE", "HOW"], [(b.rule, b.what, b.how) for b in found.breaches])
        shown.print("\n" + ", ".join(f"{n} {name.replace('_', '-')}" for name, n in found.counts.items()))
    if not found.clean:
        raise typer.Exit(1)
