"""The adapter for ``package.module:factory`` and ``path/file.py:factory``, which uses the decoder it returns.

It imports and calls only the code that the caller named.
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from kvproof._system.user_frames import describe_exit, describe_traceback
from kvproof.errors import KvproofError, UsageError
from kvproof.subjects import _registry
from kvproof.subjects._adapter import Adapter, LoadOptions, Target
from kvproof.subjects._base import Subject
from kvproof.subjects._callables import CallableSubject
from kvproof.subjects._registry import split_factory


class FactoryAdapter(Adapter):
    """Loads the decoder that the caller's function returns."""

    def load(self, target: Target, options: LoadOptions) -> Subject:
        """Import the function, call it and return its decoder as a subject."""
        names = split_factory(target.text)
        assert names is not None
        return call_factory(target.text, *names, options)


ADAPTER = FactoryAdapter()


def call_factory(target: str, home: str, name: str, options: LoadOptions) -> Subject:
    """Return the decoder that a factory creates.

    Raises `UsageError` for a module or name that does not exist, and for a factory that raises or returns
    something else.
    """
    module = _from_file(Path(home)) if home.endswith(".py") else _from_package(home)
    factory = getattr(module, name, None)
    if not callable(factory):
        found = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        own = [n for n in found if getattr(getattr(module, n), "__module__", None) == module.__name__]
        raise UsageError(f"{home} has no function {name!r}; it has: {', '.join(sorted(own)) or 'none'}")
    return as_subject(_run(target, factory), target, ids=options.ids, avoid_ids=options.avoid_ids)


def as_subject(
    decoder: object,
    name: str | None = None,
    *,
    ids: Collection[int] | None = None,
    avoid_ids: Collection[int] = (),
) -> Subject:
    """Return a subject for a decoder: a `Subject`, two functions (full, step), or an engine's own object.

    ``ids`` and ``avoid_ids`` choose the token ids that programs feed, as in `Subject.with_ids`.

    Raises `UsageError` for anything else, and for a torch module, as kvproof cannot guess its argument names.
    """
    if isinstance(decoder, tuple) and len(decoder) == 2 and all(map(callable, decoder)):
        return CallableSubject(*decoder, name=name, ids=ids, avoid_ids=avoid_ids)
    adopted = decoder if isinstance(decoder, Subject) else _adopt(decoder, name)
    if adopted is not None:
        return adopted if ids is None and not avoid_ids else adopted.with_ids(ids, avoid_ids)
    if isinstance(decoder, nn.Module):
        kind = type(decoder).__name__
        raise UsageError(
            f"{kind} is a torch module: say how it names its cache, as in ModuleSubject(module, cache='...'); "
            f"it takes forward{inspect.signature(decoder.forward)}"
        )
    raise UsageError(
        f"{name or 'a decoder'} is a {type(decoder).__name__}: give a Subject, or two functions (full, step)"
    )


def _adopt(decoder: object, name: str | None) -> Subject | None:
    """Return a subject for an engine's object; engines that are not imported cannot have created it."""
    for entry in _registry.ADAPTERS:
        if entry.library in sys.modules:
            with suppress(ImportError):
                subject = entry.import_adapter().adopt(decoder, name)
                if subject is not None:
                    return subject
    return None


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"no such file: {path}")
    sys.path.insert(0, str(path.resolve().parent))  # as if the file were run as a script
    name = f"kvproof_target_{path.stem}"  # a name that no module it imports can have
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[name] = module  # dataclasses and pickle look it up there
    _run(str(path), lambda: loader.exec_module(module))
    return module


def _from_package(name: str) -> ModuleType:
    """Import a module, which can be in the current folder, as with ``python -m``."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    top = name.partition(".")[0]
    if importlib.util.find_spec(top) is None:
        raise UsageError(f"no module named {top!r}: it is neither installed nor in this folder")
    module = _run(name, lambda: importlib.import_module(name))
    assert isinstance(module, ModuleType)
    return module


def _run(what: str, call: Callable[[], Any]) -> Any:
    """Run the caller's code; any exception but Ctrl-C becomes a `UsageError` that says where it was raised."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except KvproofError as error:
        cause = error if error.__cause__ is None else error.__cause__
        raise UsageError(f"{what}: {error}{_where(cause)}") from error
    except SystemExit as error:
        raise UsageError(f"{what} called {describe_exit(error)}") from error
    except BaseException as error:
        raise UsageError(f"{what} raised {type(error).__name__}: {error}{_where(error)}") from error


def _where(error: BaseException) -> str:
    """Return where the caller's own code raised, unless the message says so already."""
    where = "" if isinstance(error, SystemExit) else describe_traceback(error.__traceback__)
    return f" ({where})" if where else ""
