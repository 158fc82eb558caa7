"""Silences the library while kvproof loads something: any problem becomes one error on one line."""

import sys
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partialmethod

from tqdm import tqdm
from transformers.utils import logging

from kvproof.errors import UsageError


@contextmanager
def quiet() -> Iterator[None]:
    """Hide logs, progress bars and warnings, and send printed text to standard error, away from reports."""
    verbosity, started = logging.get_verbosity(), tqdm.__init__
    logging.set_verbosity_error()
    # The library's own switch does not cover all of its bars, nor those of the libraries that it uses.
    tqdm.__init__ = partialmethod(started, disable=True)
    try:
        with warnings.catch_warnings(), redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        tqdm.__init__ = started


@contextmanager
def as_usage_errors(what: str) -> Iterator[None]:
    """Run the library's own code quietly; whatever it raises becomes a `UsageError` of one line.

    ``what`` says what failed, such as ``"model cannot be loaded"``. For a damaged file, the library and those
    that it uses raise errors of any type, so all of them are caught.
    """
    try:
        with quiet():
            yield
    except UsageError:
        raise
    except Exception as error:
        text = str(error)
        if "trust_remote_code" in text:
            reason = "it brings code of its own, which runs only with --trust-remote-code"
        else:
            reason = textwrap.shorten(f"{type(error).__name__}: {text}", 300, placeholder=" …")
        raise UsageError(f"{what}: {reason}") from error
