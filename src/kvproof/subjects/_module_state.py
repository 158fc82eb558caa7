"""What a decoder keeps between two calls: what changes there is why the same call gives other rows."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

#: A name for a part of the state, and what equals itself as long as that part does not change.
State = dict[str, object]


def state_of_module(module: nn.Module) -> State:
    """Return what a module keeps: tensors by their version, numbers by their value, by class or by object."""
    state: State = {}
    for path, part in module.named_modules():
        where = f"{path}." if path else ""
        for name, tensor in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
            state[f"{where}{name}"] = _mark(tensor)
        own = {} if type(part).__module__.startswith("torch.") else vars(type(part))
        for name, value in (*own.items(), *vars(part).items()):
            if not name.startswith("__") and name != "training" and _is_plain(value):
                state[f"{where}{name}"] = _mark(value)
    return state


def random_parts(module: nn.Module) -> Iterator[str]:
    """Yield what may make a module draw random numbers: training mode, and dropout given as a number."""
    for path, part in module.named_modules():
        where = path or type(part).__name__
        if part.training:
            yield f"{where} is in training mode"
        if isinstance(part, nn.modules.dropout._DropoutNd):
            continue  # without training mode it does nothing
        for name, value in vars(part).items():
            if (
                "drop" in name.lower()
                and isinstance(value, int | float)
                and not isinstance(value, bool)
                and value
            ):
                yield f"{where}.{name} is {value:g}"


def modules_behind(function: Callable[..., Any]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a function holds: in its closure, or as the object that it is a method of."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, nn.Module):
        yield type(owner).__name__, owner
    yield from ((name, value) for name, value in _held(function) if isinstance(value, nn.Module))


def state_of_function(function: Callable[..., Any]) -> State:
    """Return what a function keeps: in its closure, in its own object, and in the modules there."""
    state: State = {}
    for name, module in modules_behind(function):
        state |= {f"{name}.{part}": mark for part, mark in state_of_module(module).items()}
    owner = getattr(function, "__self__", None)
    own = () if owner is None or isinstance(owner, nn.Module) else vars(owner).items() if _has_vars(owner) else ()
    for name, value in (*own, *_held(function)):
        if _is_plain(value):
            state[name] = _mark(value)
    return state


def _held(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    for name, cell in zip(getattr(code, "co_freevars", ()), cells, strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a variable that was not given a value yet
            continue


def _has_vars(value: object) -> bool:
    return hasattr(value, "__dict__")


def _is_plain(value: object) -> bool:
    return isinstance(value, int | float | str | Tensor) and not isinstance(value, type)


def _mark(value: Any) -> object:
    """Return what equals itself as long as a value does not change; a tensor counts its own changes."""
    return (value.data_ptr(), value._version) if isinstance(value, Tensor) else value
