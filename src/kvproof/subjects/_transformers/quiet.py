"""Silences the library while kvproof loads something: any problem becomes one error on one line."""

import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from functools import partialmethod

from tqdm import tqdm
from transformers.utils import logging

from kvproof.errors import UsageError

#: How many of the largest sizes are named where memory runs out.
_NUM_LARGEST = 3
#: How the names of members end that hold a number of something; a token id may be 0.
_SIZES = ("_size", "_dim", "_heads", "_layers", "_embeddings", "_theta", "_experts", "_groups", "_len", "_length")


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
def as_usage_errors(what: str, config: Mapping[str, object] | None = None) -> Iterator[None]:
    """Run the library's own code quietly; whatever it raises becomes a `UsageError` of one line.

    ``what`` says what failed, such as ``"model cannot be loaded"``. For a damaged file, the library and those
    that it uses raise errors of any type, so all of them are caught. The members of ``config`` that the error may
    come from are named.
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
        raise UsageError(f"{what}: {reason}{_suspects(error, config or {})}") from error


def _suspects(error: Exception, config: Mapping[str, object]) -> str:
    """Return which members of a configuration an error may come from, with their values."""
    if isinstance(error, KeyError) and error.args:
        found = dict(_members(config, lambda value: value == error.args[0]))
    elif isinstance(error, MemoryError) or "memory" in str(error):
        sizes = dict(_members(config, lambda value: type(value) is int))
        found = dict(sorted(sizes.items(), key=lambda member: -int(str(member[1])))[:_NUM_LARGEST])
    elif isinstance(error, ZeroDivisionError | IndexError) or "negative" in str(error):
        sizes = dict(_members(config, lambda value: type(value) in (int, float)))
        found = {name: value for name, value in sizes.items() if float(str(value)) <= 0 and name.endswith(_SIZES)}
    else:
        return ""
    return f" (config.json has {', '.join(f'{n}={v!r}' for n, v in found.items())})" if found else ""


def _members(config: Mapping[str, object], fits: Callable[[object], bool]) -> Iterator[tuple[str, object]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", found) for inner, found in _members(value, fits))
        elif isinstance(value, str | int | float) and fits(value):
            yield name, value
