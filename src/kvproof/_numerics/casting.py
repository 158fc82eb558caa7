"""Casts a torch module to another dtype without making another function of it.

``Module.to(float64)`` drops the imaginary part of a complex buffer, and leaves alone what is neither a parameter
nor a buffer: weights in a list, or a table in a plain attribute.
"""

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound=nn.Module)

#: The complex dtype whose parts are at least as exact as a float dtype.
COMPLEX_OF = {torch.float64: torch.complex128}


def cast_module(module: M, dtype: torch.dtype) -> M:
    """Return a deep copy of a module that holds every floating-point and complex tensor in another precision."""
    cast = copy.deepcopy(module)
    cast._apply(lambda tensor: cast_tensor(tensor, dtype))  # type: ignore[no-untyped-call]
    known: dict[int, Any] = {}
    for part in cast.modules():
        own = vars(part)
        for name, value in own.items():
            if not name.startswith("_"):
                own[name] = _cast_within(value, dtype, known)
    return cast


def cast_tensor(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in another precision; what is not a floating-point or complex number stays as it is."""
    if tensor.is_complex():
        return tensor.to(COMPLEX_OF.get(dtype, torch.complex64))
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _cast_within(value: Any, dtype: torch.dtype, known: dict[int, Any]) -> Any:
    """Return a value with the tensors in it cast: in lists, tuples and dicts, and nowhere else.

    Lists and dicts are changed in place, and ``known`` holds what was cast, so that modules go on sharing it.
    """
    if type(value) not in (Tensor, list, tuple, dict):
        return value
    if id(value) in known:
        return known[id(value)][1]
    known[id(value)] = value, value  # a list may hold itself
    result = value
    if type(value) is Tensor:
        result = cast_tensor(value, dtype)
    elif type(value) is list:
        value[:] = [_cast_within(item, dtype, known) for item in value]
    elif type(value) is tuple:
        result = tuple(_cast_within(item, dtype, known) for item in value)
    else:
        value.update({key: _cast_within(item, dtype, known) for key, item in value.items()})
    known[id(value)] = value, result  # the first keeps the id from being given to another
    return result
