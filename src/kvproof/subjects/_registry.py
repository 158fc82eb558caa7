"""The registry of adapters, with one entry for each, and the targets that each one loads.

This module imports no torch and no engine, so that help and messages can list every target. The module of an
adapter is imported when one of its targets is loaded. To add an engine, write one file with an `Adapter` and add
one line to `ADAPTERS`.
"""

import importlib
import importlib.metadata
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvproof.errors import UsageError

if TYPE_CHECKING:
    from kvproof.subjects._adapter import Adapter

_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_FACTORY = re.compile(r"(?P<home>.+):(?P<name>[A-Za-z_]\w*)")
_MODULE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetForm:
    """One way to write a target."""

    shown: str  #: the short form, such as ``random:TYPE``; the part before the colon is its scheme
    help: str  #: what the user can type and what it means
    matches: Callable[[str], bool] | None = None  #: recognises a target that has no scheme
    is_tiny: bool = False  #: its tensors are so small that more than one thread does not help
    extra: str | None = None  #: the extra that it needs besides the adapter's own

    @property
    def scheme(self) -> str | None:
        """The word before the colon, if it identifies the target."""
        return self.shown.partition(":")[0] if self.matches is None else None


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEntry:
    """What kvproof knows about an adapter before importing its module."""

    module: str  #: the module in `kvproof.subjects` whose ``ADAPTER`` loads the targets
    forms: tuple[TargetForm, ...]
    library: str | None = None  #: the distribution that it needs
    versions: tuple[str, str] | None = None  #: tested releases: from the first, below the second
    extra: str | None = None  #: the extra of kvproof that installs the library
    options: frozenset[str] = frozenset()  #: "attention" and "device", if the caller can choose them
    takes_config: bool = False  #: builds a random model from ``--config FILE``
    runs_code: bool = False  #: a target names code to run, so a target from a file needs consent
    writer: str | None = None  #: the module that writes a finding out as a file; None if ``shrink`` cannot

    def load_adapter(self, label: str) -> "Adapter":
        """Return the adapter, ready to load the target ``label``.

        Raises `UsageError` if its library is missing or is an untested release.
        """
        install = f"pip install 'kvproof[{self.extra}]'"
        try:
            if self.library is not None and self.versions is not None:
                found, (first, end) = importlib.metadata.version(self.library), self.versions
                if not _release(first) <= _release(found) < _release(end):
                    raise UsageError(
                        f"{self.library} {found} is installed, and kvproof knows {first} up to, not including, "
                        f"{end}: {install}"
                    )
            return self.import_adapter()
        except ImportError as error:  # also raised if the distribution is not installed
            if self.library is None:
                raise
            raise UsageError(f"{label} needs the {self.library} library: {install} ({error})") from error

    def import_adapter(self) -> "Adapter":
        """Import the module and return its adapter, whatever release of the library is installed."""
        adapter: Adapter = importlib.import_module(f"kvproof.subjects.{self.module}").ADAPTER
        return adapter


def split_factory(target: str) -> tuple[str, str] | None:
    """Return the module or file and the function that a target names, or None if it names no function."""
    found = _FACTORY.fullmatch(target)
    if found is None or found["home"] in _schemes():
        return None
    home, name = found["home"], found["name"]
    return (home, name) if home.endswith(".py") or _MODULE.fullmatch(home) else None


def _is_gguf(target: str) -> bool:
    return Path(target).suffix == ".gguf" and Path(target).is_file()


def _is_hub_name(target: str) -> bool:
    return Path(target).suffix != ".gguf" and _HUB_NAME.fullmatch(target) is not None


def _is_factory(target: str) -> bool:
    return not Path(target).exists() and split_factory(target) is not None


#: The first form that recognises a target without a scheme loads it. A scheme hides a module of the same name.
ADAPTERS: tuple[AdapterEntry, ...] = (
    AdapterEntry(
        module="_transformers",
        forms=(
            TargetForm(
                shown="a folder",
                help="a folder with a transformers model (safetensors)",
                matches=lambda target: Path(target).is_dir(),
            ),
            TargetForm(shown="a .gguf file", help="a .gguf file", matches=_is_gguf, extra="gguf"),
            TargetForm(shown="org/name on the hub", help="org/name in the local hub cache", matches=_is_hub_name),
            TargetForm(
                shown="random:TYPE",
                help="random:TYPE for a tiny random model of any causal type that transformers knows",
                is_tiny=True,
            ),
        ),
        library="transformers",
        versions=("4.57.6", "6"),
        extra="transformers",
        options=frozenset({"attention", "device"}),
        takes_config=True,
        writer="kvproof._shrinking.transformers_models",
    ),
    AdapterEntry(
        module="_factory",
        forms=(
            TargetForm(
                shown="module:factory",
                help="module:factory or file.py:factory for a function of yours that returns a decoder",
                matches=_is_factory,
            ),
        ),
        runs_code=True,
        writer="kvproof._shrinking.own_decoders",
    ),
)


def find_entry(target: str | None) -> AdapterEntry | None:
    """Return the adapter of a target, or of ``--config FILE`` for None; None for a target of no known form.

    Raises `UsageError` for an empty target: an unset variable of a shell would name the current folder.
    """
    if target is not None and not target.strip():
        raise UsageError(f"the target is empty: {target!r}; a dot (.) is the current folder")
    if target is None:
        return next(entry for entry in ADAPTERS if entry.takes_config)
    found = _find(target)
    return None if found is None else found[0]


def find_scheme(target: str) -> str | None:
    """Return the scheme that a target starts with, if an adapter has it."""
    scheme, colon, _ = target.partition(":")
    return scheme if colon and scheme in _schemes() else None


def runs_on_one_thread(target: str | None) -> bool:
    """Return whether a target's tensors are so small that more than one thread does not help."""
    found = None if target is None else _find(target)
    return found is not None and found[1].is_tiny


def runs_named_code(target: str) -> bool:
    """Return whether loading a target runs code that the target itself names."""
    entry = find_entry(target)
    return entry is not None and entry.runs_code


def list_forms() -> str:
    """Return the short forms of all targets, as in "neither a folder, … nor module:factory"."""
    *most, last = (form.shown for _, form in _forms())
    return f"{', '.join(most)} nor {last}"


def describe_targets() -> str:
    """Return a description of all targets, for help texts."""
    *most, last = (form.help for _, form in _forms())
    return f"{', '.join(most)}, or {last}"


def describe_extras() -> str:
    """Return which extra each adapter's targets need, for help texts."""
    sentences = []
    for entry in ADAPTERS:
        if entry.extra is not None:
            more = [f"; {form.shown} needs kvproof[{form.extra}]" for form in entry.forms if form.extra]
            sentences.append(f"Models of {entry.library} need kvproof[{entry.extra}]{''.join(more)}.")
    return " ".join(sentences)


def _find(target: str) -> tuple[AdapterEntry, TargetForm] | None:
    scheme = find_scheme(target)
    for entry, form in _forms():
        if form.scheme == scheme if scheme is not None else form.matches is not None and form.matches(target):
            return entry, form
    return None


def _forms() -> Iterator[tuple[AdapterEntry, TargetForm]]:
    yield from ((entry, form) for entry in ADAPTERS for form in entry.forms)


def _schemes() -> frozenset[str]:
    return frozenset(form.scheme for _, form in _forms() if form.scheme is not None)


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, for comparing releases; a preview counts as its release."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()
