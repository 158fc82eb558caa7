"""Runs the tests that compute under several settings, each of which makes this processor round as another would.

Run by ``make test-processors``. It prints one line for each setting: a digest of a few computations, what passed,
and how long it took. It exits with 1 if anything failed. Which variables have an effect depends on the processor
and its maker: Intel's library ignores some on AMD's. A setting with the bits of an earlier one is not run again.
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
    "AVX2 in MKL": {"MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "AVX-512": {"ATEN_CPU_CAPABILITY": "avx512", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
}

#: What computes nothing, or what it computes is only text, is left to `make test`.
TESTS = (
    "tests/unit",
    "tests/reference",
    "tests/detection",
    "tests/hf",
    "tests/golden",
    "tests/docs/test_readme.py",
    "tests/docs/test_pages.py",
    "tests/examples",
    "tests/cli/test_milestone.py",
    "tests/cli/test_audit.py",
    "tests/cli/test_generate.py",
    "tests/cli/test_lesson.py",
    "tests/cli/test_replay.py",
    "tests/cli/test_shrink.py",
)


def main(names: list[str]) -> int:
    """Run the settings of these names, or all; return the exit status."""
    unknown = [name for name in names if name not in SETTINGS]
    if unknown:
        print(f"no setting {unknown[0]!r}; there are: {', '.join(SETTINGS)}", file=sys.stderr)
        return 2
    failed = False
    seen: dict[str, str] = {}
    for name in names or SETTINGS:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **SETTINGS[name]}
        bits = bits_under(environment)
        if bits in seen:
            line = f"the same as {seen[bits]!r} here: not run again"
        else:
            seen[bits] = name
            status, line = run(environment)
            failed |= status != 0
        print(f"{name:12} bits {bits}  {line}", flush=True)
    return 1 if failed else 0


def bits_under(environment: dict[str, str]) -> str:
    """Return the digest that a process prints in an environment."""
    command = [sys.executable, __file__, "--digest"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def run(environment: dict[str, str]) -> tuple[int, str]:
    """Run the tests in an environment; return their exit status and what came of them in one line."""
    start = perf_counter()
    # Threads that find no free core spin, and make tensors this small up to a hundred times slower.
    num_workers = max(1, (os.cpu_count() or 1) // int(environment["OMP_NUM_THREADS"]))
    command = [sys.executable, "-m", "pytest", "-n", str(num_workers), "--dist", "loadgroup", *TESTS]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    last = next(
        (line for line in reversed(done.stdout.splitlines()) if re.search(r"\d+ (passed|failed)", line)), ""
    )
    if done.returncode:
        print(done.stdout[-20_000:], done.stderr[-2_000:], file=sys.stderr)
    counts = last.strip("= ") or f"exit status {done.returncode}"
    return done.returncode, f"{counts}  {perf_counter() - start:.0f} s"


def digest() -> str:
    """Return a digest of computations whose last digits depend on the processor, small ones and larger ones."""
    import torch
    from torch.nn import functional

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    generator = torch.Generator().manual_seed(0)
    state = hashlib.sha256()
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for rows, inner, columns in ((1, 64, 53), (7, 64, 53), (67, 67, 67), (300, 200, 300)):
            left = torch.randn(rows, inner, generator=generator).to(dtype)
            right = torch.randn(inner, columns, generator=generator).to(dtype)
            heads = left[None, None].expand(1, 2, rows, inner).contiguous()
            values = (
                left @ right,
                torch.bmm(heads[0], right.expand(2, inner, columns)),
                functional.scaled_dot_product_attention(heads, heads, heads),
                functional.layer_norm(left, (inner,)),
                functional.conv1d(
                    left[None], right[:rows, None, :4].repeat(-(-rows // inner), 1, 1)[:rows], groups=rows
                ),
                left.softmax(-1),
                left.exp().sum(-1),
                functional.silu(left),
            )
            for value in values:
                state.update(value.double().numpy().tobytes())
    return state.hexdigest()[:8]


if __name__ == "__main__":
    if sys.argv[1:] == ["--digest"]:
        print(digest())
    else:
        sys.exit(main(sys.argv[1:]))
