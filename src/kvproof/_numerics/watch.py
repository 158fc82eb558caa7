"""A watch on the dtypes that a run computes in: what is said to be float64 must be float64 throughout.

A kernel that accumulates in float32, a conversion through another framework, a cast that no one asked for by
name: each leaves rounding of float32's size in a row of float64, which would be taken for a bug.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kvproof._numerics.dtypes import name_of
from kvproof._numerics.modes import PairedMode

#: Operations that torch itself defines; what another library registers may compute in any dtype inside.
_OWN = frozenset({"aten", "prims", "prim", "profiler"})
#: Ways out of torch, by which a value may be computed on elsewhere.
_WAYS_OUT = {
    torch.Tensor.numpy: "Tensor.numpy",
    torch.Tensor.__array__: "Tensor.__array__",
    torch.Tensor.__dlpack__: "Tensor.__dlpack__",
    torch.Tensor.data_ptr: "Tensor.data_ptr",
}


class Watch(PairedMode):  # type: ignore[no-untyped-call]
    """While it is entered, notes the dtypes of results, and where a value is put into a coarser one."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()  #: of every result that hangs on a floating-point value
        self.lowered: dict[str, None] = {}  #: the operations that give a coarser result than they are given
        self.unseen: str | None = None  #: what may compute in a dtype that the watch cannot see
        self._storages: set[int] = set()
        self.functions = _WaysOut(self)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and note its dtypes."""
        result = func(*args, **(kwargs or {}))
        given = [_eps(value) for value in _numbers((args, kwargs or {}))]
        if not given:
            return result  # a constant, or an index
        if func.namespace not in _OWN:
            self.unseen = self.unseen or f"{func} is a kernel of another library"
        aliases = [returned.alias_info for returned in func._schema.returns]
        if any(alias is not None and not alias.is_write for alias in aliases):
            return result  # a view computes nothing
        if func.overloadpacket is torch.ops.aten.clone and not self.saw(args[0]):
            return result  # nor does a copy: what came from elsewhere still does
        for value in _numbers(result):
            self.dtypes.add(value.dtype)
            self._storages.add(value.untyped_storage().data_ptr())
            if _eps(value) > min(given):
                self.lowered[f"{func.overloadpacket.__name__} gives {name_of(value.dtype)}"] = None
        return result

    def saw(self, value: Tensor) -> bool:
        """Return whether a tensor came out of an operation that was seen."""
        return value.untyped_storage().data_ptr() in self._storages

    @property
    def coarsest(self) -> float | None:
        """The unit of the coarsest dtype that was seen; None if something was not seen."""
        units = [torch.finfo(dtype).eps for dtype in self.dtypes]
        return max(units) if units and self.unseen is None else None


class _WaysOut(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func in _WAYS_OUT and args[0].is_floating_point():
            self._watch.unseen = self._watch.unseen or f"{_WAYS_OUT[func]} takes a value out of torch"
        return func(*args, **(kwargs or {}))


def _numbers(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point and complex tensors with entries within arguments or results."""
    if isinstance(value, Tensor):
        if (value.is_floating_point() or value.is_complex()) and value.numel():
            yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _numbers(item)


def _eps(value: Tensor) -> float:
    return torch.finfo(value.dtype).eps
