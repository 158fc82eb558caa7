"""The command ``kvproof check``: does an adapter keep the promises that it makes?"""

from contextlib import nullcontext
from dataclasses import replace

import click

from kvproof.cli.guard import guard
from kvproof.cli.options import Finished, Loading, ids_options, loading_options, read_ids
from kvproof.cli.outputs import print_text, write_outputs
from kvproof.cli.progress import show_progress
from kvproof.subjects._registry import describe_targets, runs_on_one_thread


@click.command()
@click.argument("target")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of a random model.")
@loading_options
@ids_options
@click.option("--quiet", is_flag=True, help="Print only broken promises; no progress bar.")
def check(target: str, seed: int, loading: Loading, ids: str | None, avoid_ids: str | None, quiet: bool) -> None:
    """Check that the adapter of TARGET keeps its promises, on a few tokens.

    TARGET is {targets}. An audit trusts the adapter: run this first on a decoder of your own, to tell a broken
    adapter from a broken decoder. What raises is shown with its own file and line. Exits with 0 if all promises
    are kept, and with 1 if one is broken.
    """
    guard((target,), trusts_code=loading.trust_remote_code, timeout_s=loading.timeout_s)
    with show_progress(quiet) as progress:
        from kvproof import conformance
        from kvproof._system.machine import use_one_thread
        from kvproof.subjects._targets import load_target

        with use_one_thread() if runs_on_one_thread(target) else nullcontext():
            progress.stage(f"loading {target}")
            used, avoided = read_ids(ids), read_ids(avoid_ids) or ()
            subject = load_target(target, replace(loading.options(seed), ids=used, avoid_ids=avoided))
            progress.stage("checking promises")
            found = conformance.check(subject)
    text = "".join(f"{each}\n" for each in found.checks if each.problem) if quiet else f"{found}\n"
    raise Finished(write_outputs([lambda: print_text(text)] if text else [], 0 if found.passed else 1))


check.help = str(check.help).format(targets=describe_targets())
