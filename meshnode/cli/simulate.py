"""meshnode lab simulate"""

from __future__ import annotations

import collections
import sys

import click

from ..errors import MeshError
from . import show


@click.command("simulate")
@click.option(
    "--seed", type=int, default=1, show_default=True, help="What the run, or the first of them, is made from."
)
@click.option(
    "--runs", type=click.IntRange(1, 1_000_000), default=1, show_default=True, help="Seeds, one after another."
)
@click.option("--log", is_flag=True, help="Print every event of the runs.")
@click.option(
    "--figures", is_flag=True, help="Measure routing: cost over the optimum, churn, hostile messages, cancels."
)
@click.option("--small", is_flag=True, help="With --figures: a tenth of everything.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(seed: int, runs: int, log: bool, figures: bool, small: bool, as_json: bool) -> None:
    """Run a mesh of fake workers and links on a virtual clock, with faults at random moments.

    Routes, sessions, leases and recovery are the real code. The same seed gives the same events. Ends with status 1
    when a promise was broken.
    """
    from ..lab import figures as measured
    from ..lab.simulate import digest_of, simulate

    if figures:
        found = measured.measure(seed, small=small, say=None if as_json else show.note)
        show.as_json(found)
        if found["broken"]:
            raise MeshError("internal", "a figure is not what it has to be: " + ", ".join(found["broken"]))
        return
    done = [simulate(number) for number in range(seed, seed + runs)]
    ended = collections.Counter(outcome.ended for run in done for outcome in run.outcomes)
    wrong = {run.seed: run.faults for run in done if run.faults}
    if as_json:
        events = {"log": [line for run in done for line in run.log]} if log else {}
        requests = dict(sorted(ended.items()))
        show.as_json(
            {"seed": seed, "runs": runs, "requests": requests, "digest": digest_of(done), "wrong": wrong, **events}
        )
    else:
        for run in done if log else ():
            click.echo("\n".join(run.log))
        said = ", ".join(f"{count} {what}" for what, count in sorted(ended.items()))
        click.echo(f"{runs} runs from seed {seed}: {said}; events {digest_of(done)[:16]}")
        for number, faults in wrong.items():
            click.echo(f"seed {number}: {'; '.join(faults)}")
    if wrong:
        sys.exit(1)
