"""Floating-point dtypes and the names that reports give them."""

import torch

from kvproof.errors import UsageError


def dtype_of(name: str) -> torch.dtype:
    """Return the floating-point dtype of a name such as "bfloat16"; raise `UsageError` for any other name."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(
            f"no such floating-point dtype: {name!r}; torch knows float32, bfloat16, float16, float64"
        )
    return dtype


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
