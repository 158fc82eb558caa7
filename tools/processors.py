"""Runs the tests that compute under several settings, each of which makes this processor round as another would.

Run by ``make test-processors``. It prints one line for each setting: a digest of a few computations, what passed,
and how long it took. It exits with 1 if anything failed. Which variables have an effect depends on the processor
and its maker: where two digests agree, the two settings tried the same thing.
"""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from time import perf_counter

ROOT = Path(__file__).parents[1]

#: Name, and the variables that make it. The first changes nothing.
SETTINGS: dict[str, dict[str, str]] = {
    "as it is": {},
    "two threads": {"OMP_NUM_THREADS": "2"},
    "no vectors": {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "SSE4.2": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "MKL_CBWR": "SSE4_2"},
    "AVX": {"MKL_ENABLE_INSTRUCTIONS": "AVX", "MKL_CBWR": "AVX", "ONEDNN_MAX_CPU_ISA": "AVX"},
    "AVX2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "AVX-512": {"ATEN_CPU_CAPABILITY": "avx512", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
}

#: What computes nothing, or what it computes is only text, is left to `make test`.
TESTS = (
    "tests/unit",
    "tests/reference",
    "tests/detection",
    "tests/hf",
    "tests/golden",
    "tests/docs",
    "tests/examples",
    "tests/cli/test_milestone.py",
    "tests/cli/test_audit.py",
    "tests/cli/test_shrink.py",
)


def main(names: list[str]) -> int:
    """Run the settings of these names, or all; return the exit status."""
    unknown = [name for name in names if name not in SETTINGS]
    if unknown:
        print(f"no setting {unknown[0]!r}; there are: {', '.join(SETTINGS)}", file=sys.stderr)
        return 2
    failed = False
    for name in names or SETTINGS:
        status, line = run(SETTINGS[name])
        failed |= status != 0
        print(f"{name:12} {line}", flush=True)
    return 1 if failed else 0


def run(variables: dict[str, str]) -> tuple[int, str]:
    """Run the tests under a setting; return their exit status and what came of them in one line."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    bits = subprocess.run(
        [sys.executable, __file__, "--digest"], env=environment, capture_output=True, text=True, check=True
    )
    start = perf_counter()
    command = [sys.executable, "-m", "pytest", "-n", "2", "--dist", "loadgroup", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    last = next(
        (line for line in reversed(done.stdout.splitlines()) if re.search(r"\d+ (passed|failed)", line)), ""
    )
    if done.returncode:
        print(done.stdout[-20_000:], file=sys.stderr)
    counts = last.strip("= ") or f"exit status {done.returncode}"
    return done.returncode, f"bits {bits.stdout.strip()}  {counts}  {perf_counter() - start:.0f} s"


def digest() -> str:
    """Return a digest of computations whose last digits depend on the processor."""
    import torch

    generator = torch.Generator().manual_seed(0)
    state = hashlib.sha256()
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        left, right = (torch.randn(67, 67, generator=generator).to(dtype) for _ in range(2))
        for value in (left @ right, left.softmax(-1), left.exp().sum(), torch.nn.functional.silu(right)):
            state.update(value.double().numpy().tobytes())
    return state.hexdigest()[:8]


if __name__ == "__main__":
    if sys.argv[1:] == ["--digest"]:
        print(digest())
    else:
        sys.exit(main(sys.argv[1:]))
