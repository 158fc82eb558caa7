"""From ``package.module:factory`` or ``path/file.py:factory`` to the decoder that the factory returns.

This runs code that the caller named, as importing it does; nothing else is looked for and run.
"""

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from kvproof.errors import KvproofError, UsageError
from kvproof.subjects._base import Subject
from kvproof.subjects._callables import CallableSubject

_TARGET = re.compile(r"(?P<home>.+):(?P<name>[A-Za-z_]\w*)")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def factory_of(target: str) -> tuple[str, str] | None:
    """Return the module, or file, and the name that a target consists of; None where it is no such target."""
    found = _TARGET.fullmatch(target)
    if found is None or found["home"] == "random":
        return None
    home, name = found["home"], found["name"]
    return (home, name) if home.endswith(".py") or _MODULE.fullmatch(home) else None


def subject_from(target: str, home: str, name: str) -> Subject:
    """Return the decoder that a factory makes.

    Raises `UsageError` for a module or name that is not there, a factory that raises, and one that returns
    something else.
    """
    module = _from_file(Path(home)) if home.endswith(".py") else _from_package(home)
    factory = getattr(module, name, None)
    if not callable(factory):
        found = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
        own = [n for n in found if getattr(getattr(module, n), "__module__", None) == module.__name__]
        raise UsageError(f"{home} has no function {name!r}; it has: {', '.join(sorted(own)) or 'none'}")
    return as_subject(_run(target, factory), target)


def as_subject(decoder: object, name: str | None = None) -> Subject:
    """Return what someone brought as a subject: a `Subject`, functions (full, step), or a transformers model.

    Raises `UsageError` for anything else, and for a torch module, whose argument names must be told.
    """
    if isinstance(decoder, Subject):
        return decoder
    if isinstance(decoder, tuple) and len(decoder) == 2 and all(map(callable, decoder)):
        return CallableSubject(*decoder, name=name)
    if isinstance(decoder, nn.Module):
        if hasattr(decoder, "config") and "transformers" in sys.modules:
            from transformers import PreTrainedModel

            if isinstance(decoder, PreTrainedModel):
                from kvproof.subjects._transformers import TransformersSubject

                return TransformersSubject(decoder, name=name or type(decoder).__name__)
        kind = type(decoder).__name__
        raise UsageError(
            f"{kind} is a torch module: say how it names its cache, as in ModuleSubject(module, cache='...'); "
            f"it takes forward{inspect.signature(decoder.forward)}"
        )
    raise UsageError(
        f"{name or 'a decoder'} is a {type(decoder).__name__}: give a Subject, or two functions (full, step)"
    )


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UsageError(f"no such file: {path}")
    sys.path.insert(0, str(path.resolve().parent))  # as when the file is run
    name = f"kvproof_target_{path.stem}"  # which no module that it imports goes by
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module, loader = importlib.util.module_from_spec(spec), spec.loader
    sys.modules[name] = module  # what it defines looks itself up there
    _run(str(path), lambda: loader.exec_module(module))
    return module


def _from_package(name: str) -> ModuleType:
    """Import a module; what stands in the current folder can be named too, as with ``python -m``."""
    if "" not in sys.path:
        sys.path.insert(0, "")
    top = name.partition(".")[0]
    if importlib.util.find_spec(top) is None:
        raise UsageError(f"no module named {top!r}: it is neither installed nor in this folder")
    module = _run(name, lambda: importlib.import_module(name))
    assert isinstance(module, ModuleType)
    return module


def _run(what: str, call: Callable[[], Any]) -> Any:
    """Run code that was named; what it raises is the caller's to mend."""
    try:
        return call()
    except KvproofError as error:
        raise UsageError(f"{what}: {error}") from error
    except Exception as error:
        raise UsageError(f"{what} raised {type(error).__name__}: {error}") from error
