"""Tables that a model computes when it is built: slopes, decay factors, angles."""

import copy

import torch
from transformers import PreTrainedModel

from kvproof._numerics.true_float64 import TrueFloat64

#: A buffer that differs from a new model's by more than this is learned, not a table. In units in the last place
#: of the buffer's largest value, because the sine of a rounded angle has the same error where it is small.
_UNITS = 8
#: A second model is not built if it would have this many weights.
_MANY_WEIGHTS = 10**9


def exact_tables(model: PreTrainedModel, rounded_to: torch.dtype) -> tuple[str, ...]:
    """Recompute a model's tables in float64 and replace them; return the names of those that changed."""
    if model.num_parameters() > _MANY_WEIGHTS:
        return ()
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.set_default_dtype(torch.float64)
        try:
            with TrueFloat64():
                fresh = dict(type(model)(copy.deepcopy(model.config)).named_buffers())
        finally:
            torch.set_default_dtype(before)
    names, rounding = [], _UNITS * torch.finfo(rounded_to).eps
    for name, buffer in model.named_buffers():
        if not buffer.is_floating_point() or name not in fresh or fresh[name].shape != buffer.shape:
            continue
        exact = fresh[name].to(buffer)
        least = rounding * float(buffer.abs().max()) if buffer.numel() else 0.0
        if torch.allclose(exact, buffer, rtol=rounding, atol=least) and not torch.equal(exact, buffer):
            buffer.copy_(exact)
            names.append(name)
    return tuple(names)
