"""The library's other caches, what each needs, and the windows that configurations declare."""

import os
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from shutil import which
from time import time
from typing import Any, Final

import torch
from torch import Tensor
from transformers import DynamicCache, QuantizedCache, StaticCache

from kvproof.scenarios import Ability, CacheKind

#: Large and finite. Its square must not overflow, and it must not raise a masked score above the lowest value.
_GARBAGE: Final = 1e4

#: The packages that can quantise a cache, by the library's name for the backend.
_BACKENDS: Final = {"quanto": "optimum.quanto", "hqq": "hqq"}

#: The file that optimum-quanto compiles.
_KERNEL: Final = "quanto_cpp.so"
#: How long compiling a package's kernel may take, in seconds; it takes a minute.
_MAX_BUILD_S: Final = 600

#: Names under which configurations declare the window or block length of attention, a convolution or a scan.
_WINDOWS: Final = (
    "sliding_window",
    "sliding_window_size",
    "window_size",
    "local_attention",
    "attention_window_size",
    "attention_chunk_size",
    "keep_window_size",
    "index_topk",
    "conv_kernel",
    "conv_kernel_size",
    "conv1d_width",
    "conv_L_cache",
    "d_conv",
    "mamba_d_conv",
    "linear_conv_kernel_dim",
    "chunk_size",
    "mamba_chunk_size",
)

#: If a configuration lists its kinds of layers, a length counts only if this kind is among them.
_LAYER_KINDS: Final = {"sliding_window": "sliding", "attention_chunk_size": "chunked"}


def new_cache(kind: CacheKind, config: Any, capacity: int) -> Any:
    """Return an empty cache of a kind other than the dynamic one, for at least ``capacity`` tokens."""
    if kind is CacheKind.STATIC:
        return StaticCache(config=config, max_cache_len=capacity)
    if kind is CacheKind.OFFLOADED:
        return DynamicCache(config=config, offloading=True)
    backend = next(_backends())
    if backend == "quanto":
        _use_compiled_kernel()
    return QuantizedCache(backend=backend, config=config)


def why_not(kind: CacheKind, config: Any, device: torch.device) -> str | None:
    """Return why a model cannot keep such a cache, or None if it can."""
    if kind is CacheKind.OFFLOADED and device.type == "cpu":
        return "an offloaded cache moves between a device and the host, and the model stands on the CPU"
    if kind is CacheKind.QUANTISED and (problem := _why_no_backend()) is not None:
        return problem
    try:
        new_cache(kind, config, 1)
    except Exception as error:  # the library raises errors of many types for layers without such a cache
        return f"the library makes no {kind.value} cache for it: {type(error).__name__}: {error}"
    return None


def _why_no_backend() -> str | None:
    """Return why no package can quantise a cache here, or None if one can."""
    backend = next(_backends(), None)
    if backend is None:
        return "a quantised cache needs optimum-quanto or hqq, and neither is installed"
    spec = find_spec(_BACKENDS[backend])
    if backend != "quanto" or spec is None or spec.origin is None:
        return None
    return why_not_compiled(Path(spec.origin).parent / "library" / "extensions" / "cpp" / "build")


def why_not_compiled(folder: Path) -> str | None:
    """Return why optimum-quanto cannot use the kernel that it compiles into ``folder``, or None if it can.

    Whoever finds a lock there waits until it is gone: for ever, if the process that made it was killed.
    """
    lock = folder / "lock"
    if _is_compiled(folder):
        return None
    if lock.exists():
        if time() - lock.stat().st_mtime <= _MAX_BUILD_S:
            return None
        return f"optimum-quanto would wait for a build of its kernel that never ended: remove {lock}"
    missing = [name for name in (os.environ.get("CXX", "c++"), "ninja") if which(name) is None]
    if missing:
        return f"optimum-quanto compiles its kernel at first use, and {' and '.join(missing)} is not installed"
    return None


def _use_compiled_kernel() -> None:
    """Load optimum-quanto's kernel without its lock, which a killed audit would leave behind."""
    ext = import_module("optimum.quanto.library.extensions.cpp").ext
    folder = Path(ext.build_directory)
    if ext._lib is not None or not _is_compiled(folder):
        return
    spec = spec_from_file_location(ext.name, folder / _KERNEL)
    if spec is not None and spec.loader is not None:
        kernel = module_from_spec(spec)
        spec.loader.exec_module(kernel)
        ext._lib = kernel


def _is_compiled(folder: Path) -> bool:
    """Return whether a kernel for the installed torch is in ``folder``: its version is written once it ran."""
    version = folder / "pytorch_version.txt"
    return (folder / _KERNEL).exists() and version.exists() and version.read_text().strip() == torch.__version__


def has_spare_slots(config: Any) -> bool:
    """Return whether some layer of a static cache has slots, and not only a state."""
    return any(hasattr(layer, "max_cache_len") for layer in new_cache(CacheKind.STATIC, config, 1).layers)


def poison(cache: Any) -> int:
    """Fill every slot that holds no token with large finite garbage; return the number of values written.

    Only layers with a preallocated buffer have such slots.
    """
    return sum(_filled(buffer, axis, held) for buffer, axis, held in _buffers(cache))


def windows(config: Any) -> tuple[int, ...]:
    """Return the lengths of at least 2 that a configuration declares, smallest first."""
    kinds = getattr(config, "layer_types", None)
    found = set()
    for name in _WINDOWS:
        value = getattr(config, name, None)
        listed = kinds is None or any(_LAYER_KINDS.get(name, "") in str(kind) for kind in kinds)
        if isinstance(value, int) and value >= 2 and listed:
            found.add(value)
    return tuple(sorted(found))


def lacks(reasons: dict[CacheKind, str | None]) -> dict[Ability, str]:
    """Return the reasons, keyed by the ability that is missing."""
    return {kind.ability: reason for kind, reason in reasons.items() if kind.ability and reason}


def _backends() -> Iterator[str]:
    for backend, package in _BACKENDS.items():
        if find_spec(package.partition(".")[0]) is not None and find_spec(package) is not None:
            yield backend


def _buffers(cache: Any) -> Iterator[tuple[Tensor, int, int]]:
    """Yield each preallocated buffer, its slot axis, and how many slots hold a token."""
    for layer in getattr(cache, "layers", ()):
        if not hasattr(layer, "max_cache_len") or not getattr(layer, "is_initialized", False):
            continue
        for name, axis in (("keys", -2), ("values", -2), ("indexer_keys", -2)):
            buffer = getattr(layer, name, None)
            if isinstance(buffer, Tensor):
                yield buffer, axis, min(int(layer.get_seq_length()), buffer.shape[axis])


def _filled(buffer: Tensor, axis: int, held: int) -> int:
    rest = buffer.narrow(axis, held, buffer.shape[axis] - held)
    rest.fill_(min(_GARBAGE, torch.finfo(buffer.dtype).max ** 0.5))
    return rest.numel()
