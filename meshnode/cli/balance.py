"""meshnode balance [PEER]"""

from __future__ import annotations

import click

from ..ledger import views
from . import show
from .options import common, home_of
from .receipts import ledger_of


@click.command("balance")
@click.argument("peer", required=False)
@common
def command(peer: str | None, home: str | None, as_json: bool) -> None:
    """Show what peers did for others, and what others did for them, in layers times positions.

    Only work counts that two signed sides speak for. Strangers can sign each other any amount: a balance is shown, and
    ranks nobody by itself.
    """
    with ledger_of(home_of(home)) as ledger:
        found = views.balances(ledger, peer)
    if as_json:
        return show.as_json({"balances": found})
    rows = [(row["peer"], row["served"], row["used"]) for row in found]
    show.table(("peer", "served", "used"), rows, nothing="Nothing was done yet that two sides speak for.")
    return None
