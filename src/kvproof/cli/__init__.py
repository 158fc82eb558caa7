"""The command line. Nothing heavy is imported before a command runs."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import click

from kvproof._system.supervisor import finish, interrupt_once
from kvproof._system.user_frames import describe_traceback
from kvproof.cli.audit import audit
from kvproof.cli.catalogue import faults
from kvproof.cli.check import check
from kvproof.cli.generate import generate
from kvproof.cli.lesson import lesson, milestone
from kvproof.cli.options import EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_OUTPUT, EXIT_USAGE, Finished
from kvproof.cli.outputs import complain
from kvproof.cli.replay import replay
from kvproof.cli.report import render, shrink
from kvproof.cli.sweep import sweep
from kvproof.errors import KvproofError, OutputError, UsageError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="kvproof")
def cli() -> None:
    """Does a decoder's cached path compute the same logits as its uncached path?

    \b
    Exit status: 0 match or rounding; 1 diverged, or a gate that fails; 2 wrong usage, or code of yours that ends
    or blocks the process; 3 inconclusive; 4 vacuous; 5 a scenario that was named or required was not checked, or
    nothing was; 6 raised: the cached path raises where the uncached path does not; 70 an error inside kvproof;
    73 a result that could not be written; 130 interrupted, by Ctrl-C or SIGTERM.
    """


for _command in (milestone, audit, check, generate, replay, faults, sweep, render, shrink, lesson):
    cli.add_command(_command)


def main() -> None:
    """Run the command line; every way out has its exit status and says why in one line."""
    if os.environ.get("_KVPROOF_COMPLETE"):
        cli(prog_name="kvproof")  # a shell asks for completions: click answers, and exits
    with _handle_signals():
        status = _status_of(lambda: cli(standalone_mode=False))
        finish(status)
    sys.exit(status)


@contextmanager
def _handle_signals() -> Iterator[None]:
    """Let SIGTERM interrupt a command as Ctrl-C does, so that what is done so far is reported."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupt = interrupt_once()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in before.items():
        if handler in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:
                signal.signal(number, handler)


def _status_of(run: Callable[[], object]) -> int:
    try:
        run()
    except Finished as done:
        return done.status
    except click.ClickException as error:
        with suppress(OSError):
            error.show()
        return EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        complain("interrupted; no file was left half-written")
        return EXIT_INTERRUPTED
    except UsageError as error:
        complain(str(error))
        return EXIT_USAGE
    except OutputError as error:
        complain(str(error))
        return EXIT_OUTPUT
    except KvproofError as error:
        complain(f"{type(error).__name__}: {error}")
        return EXIT_INTERNAL
    except OSError as error:  # from printing help
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the interpreter flushes it when it exits
        complain(f"cannot write to standard output: {error.strerror}")
        return EXIT_OUTPUT
    except Exception:
        traceback.print_exc()
        complain("this is an error inside kvproof, not in what it was given")
        return EXIT_INTERNAL
    except BaseException as error:  # kvproof raises none itself
        where = describe_traceback(error.__traceback__)
        complain(f"code of yours raised {type(error).__name__}: {error}{f' ({where})' if where else ''}")
        return EXIT_USAGE
    return 0
