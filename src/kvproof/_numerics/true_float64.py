"""True float64: what computes in a lower type inside a float64 model computes in float64 instead.

Casting a model's weights is not enough. Norms, rotary tables, softmax and routers of real models ask for
float32 by name, which leaves about 1e-6 of rounding where float64 alone would leave 1e-14: enough to hide a
bug of that size, or to be taken for one.

Which of equal scores a top-k takes is not a question of algebra either: the kernels' answer depends on the
tensor's length, so the same token may get other experts, or other keys, in a longer call. At the top rung the
lowest index wins.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

#: What a lower type is raised to.
_RAISED = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
    torch.complex32: torch.complex128,
}
_CASTS = {
    torch.Tensor.float: torch.float64,
    torch.Tensor.half: torch.float64,
    torch.Tensor.bfloat16: torch.float64,
    torch.Tensor.cfloat: torch.complex128,  # type: ignore[attr-defined]
    torch.Tensor.chalf: torch.complex128,
}
_NAMES_TYPES = frozenset({torch.dtype, str})  # what a type may be asked for by
_TOP_K = frozenset({torch.topk, torch.Tensor.topk})
_LOWER_NAMES = frozenset({"torch.FloatTensor", "torch.HalfTensor", "torch.BFloat16Tensor"})


class TrueFloat64(TorchFunctionMode):
    """While it is entered, every request for a lower float type is a request for float64.

    Rewritten are ``dtype`` arguments of any torch function, ``.float()``, ``.half()``, ``.bfloat16()`` and their
    complex kin, and type names; a complex type becomes complex128; what is made without a type is float64; and a
    top-k breaks ties by the lowest index. Enter it around a forward alone: a model that is built, or a fault that
    is planted, inside it would not be the one that runs outside.
    """

    def __enter__(self) -> "TrueFloat64":
        self._default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        torch.set_default_dtype(self._default)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one torch function with its dtype arguments raised."""
        kwargs = kwargs or {}
        if func in _CASTS:
            return args[0].to(_CASTS[func])
        if func in _TOP_K and "out" not in kwargs:
            return stable_top_k(*args, **kwargs)
        for value in args:  # a loop: this runs for every operation of every forward
            if type(value) in _NAMES_TYPES:
                args = tuple(map(_raised, args))
                break
        if kwargs:
            kwargs = {name: _raised(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def stable_top_k(
    input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the top k, the lowest index first among equal ones; another mode sees it as one torch function."""
    if has_torch_function_unary(input):
        rest = (k, dim, largest, sorted)
        found: tuple[Tensor, Tensor] = handle_torch_function(stable_top_k, (input,), input, *rest)
        return found
    values, indices = torch.sort(input, dim=dim, descending=largest, stable=True)
    kept = (values.narrow(dim, 0, k).contiguous(), indices.narrow(dim, 0, k).contiguous())
    return torch.return_types.topk(kept)


def _raised(value: Any) -> Any:
    """Return float64, or complex128, for a lower type, and anything else as it is."""
    if isinstance(value, torch.dtype):
        return _RAISED.get(value, value)
    if isinstance(value, str):
        return "torch.DoubleTensor" if value in _LOWER_NAMES else value
    return value
