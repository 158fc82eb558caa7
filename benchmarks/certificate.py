"""What a certificate costs beside the audit that it certifies: ``make bench-certificate``.

The whole catalogue is audited on random models of several kinds, with a certificate and without, one thread.
Needs kvproof[transformers].
"""

import argparse
import statistics
import sys
import time

import torch

from kvproof._engine.audit import audit
from kvproof._engine.prompts import random_sequences
from kvproof.scenarios import catalogue
from kvproof.subjects._transformers import random_model

#: Dense, windowed, with experts, hybrid: types that pass, because what diverges gets no certificate.
TYPES = ("llama", "gemma3_text", "mixtral", "deepseek_v3", "falcon_h1")
MOST = 2.0
LENGTH = 28


def seconds(model_type: str, *, certificate: bool) -> float:
    """Return how long one audit takes."""
    subject = random_model(model_type, seed=0, dtype=torch.float32, attention="eager")
    programs = catalogue(*random_sequences(subject, LENGTH, 0), subject.boundaries)
    start = time.perf_counter()
    report = audit(subject, programs, all_values=False, certificate=certificate)
    if not report.verdict.passes or (certificate and report.certificate is None):
        raise SystemExit(f"{model_type} gives no certificate: {report.summary}")
    return time.perf_counter() - start


def main() -> int:
    """Print the ratios; return 1 if one is beyond its budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    beyond = 0
    for model_type in TYPES:
        seconds(model_type, certificate=False)  # warm up
        pairs = []
        for number in range(rounds):
            # In turns first, so that what else the machine does hits both alike.
            took = {certificate: seconds(model_type, certificate=certificate) for certificate in _order(number)}
            pairs.append((took[True] - took[False], took[False]))
        ratio = statistics.median(extra / audited for extra, audited in pairs)
        beyond += ratio > MOST
        extra, audited = (statistics.median(side) for side in zip(*pairs, strict=True))
        late = "  BEYOND" if ratio > MOST else ""
        times = f"{extra:.1f} / {audited:.1f} s"
        print(f"{model_type:14} certificate / audit {ratio:5.2f}  at most {MOST:g}  {times}{late}", flush=True)
    return int(bool(beyond))


def _order(number: int) -> tuple[bool, bool]:
    return (True, False) if number % 2 else (False, True)


if __name__ == "__main__":
    sys.exit(main())
