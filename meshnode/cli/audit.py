"""meshnode audit ID"""

from __future__ import annotations

import click

from ..api.connect import Control
from ..errors import MeshError
from . import show
from .endings import Told
from .options import common, home_of

AUDIT_S = 180.0  # a hop may take two minutes to be done again


@click.command("audit")
@click.argument("id_", metavar="ID")
@common
def command(id_: str, home: str | None, as_json: bool) -> None:
    """Do the work of a session again, and compare: ID is the beginning of one that `meshnode receipts` lists.

    This node has to hold the layers, with the same recipe, and who asked must have consented; hops keep what it takes
    for ten minutes. What is found is signed and told to everybody. The exit status is 0 only if all agrees.
    """
    with Control(home_of(home), patience_s=AUDIT_S) as node:
        findings = node.audit(id_)
    if as_json:
        show.as_json({"findings": findings})
    else:
        rows = [(f["peer"], f["verdict"], f["position"], f["receipt"][:12]) for f in findings]
        show.table(("peer", "verdict", "position", "receipt"), rows)
    if any(finding["verdict"] != "agrees" for finding in findings):
        raise Told(MeshError("bad_receipt", "an audit does not agree"))
