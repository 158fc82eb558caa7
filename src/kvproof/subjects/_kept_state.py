"""State that a decoder keeps in itself, such as preallocated caches in buffers: each session has its own."""

import copy
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn

from kvproof.errors import UsageError


class KeptState:
    """Saves what a decoder keeps in itself, and puts it back before the next call of the same session."""

    def __init__(
        self,
        owner: Any,
        save: Callable[[], Any],
        load: Callable[[Any], None],
        names: frozenset[str] = frozenset(),
    ) -> None:
        """Take two functions: ``save()`` returns a copy, and ``load(copy)`` puts it back and shares nothing."""
        self.owner = owner  #: what operations on the cache get
        self.names = names  #: what it is called in the decoder, where that is known
        self.save = save
        self.load = load

    @classmethod
    def of_module(cls, module: nn.Module, names: Sequence[str]) -> "KeptState":
        """Return the state in the buffers and attributes of a module with these names, such as ``layers.*.k``.

        Raises `UsageError` for a name that nothing in the module has.
        """
        places = [place for name in names for place in _places(module, name)]

        def save() -> dict[tuple[str, str], Any]:
            return {(path, name): copy.deepcopy(getattr(part, name)) for path, part, name in places}

        def load(saved: dict[tuple[str, str], Any]) -> None:
            for path, part, name in places:
                value, now = saved[path, name], getattr(part, name)
                if isinstance(value, Tensor) and isinstance(now, Tensor) and _are_alike(value, now):
                    now.copy_(value)  # the decoder may hold the same tensor elsewhere, too
                else:
                    setattr(part, name, copy.deepcopy(value))

        names_in_module = frozenset(f"{path}.{name}" if path else name for path, _, name in places)
        return cls(module, save, load, names_in_module)


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device


def _places(module: nn.Module, pattern: str) -> list[tuple[str, nn.Module, str]]:
    known = {(f"{path}." if path else "") + name: (path, part, name) for path, part, name in _attributes(module)}
    found = [place for full_name, place in known.items() if fnmatchcase(full_name, pattern)]
    if not found:
        raise UsageError(
            f"state={pattern!r}: {type(module).__name__} has no such buffer or attribute; it has: "
            f"{', '.join(known) or 'none'}"
        )
    return found


def _attributes(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield the path, the module and the name of every buffer and own attribute."""
    for path, part in module.named_modules():
        for name, _ in part.named_buffers(recurse=False):
            yield path, part, name
        for name, value in () if type(part).__module__.startswith("torch.") else vars(part).items():
            if not name.startswith("_") and name != "training" and not isinstance(value, nn.Module):
                yield path, part, name
