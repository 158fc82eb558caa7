"""How much memory an audit takes beside the model's own: ``make bench-memory``.

A tiny llama with a vocabulary of 262,144 is stepped through by hand over 4,096 tokens, and then audited over
the same tokens in another process. The difference of the two peaks of resident memory is what the audit takes,
with its float64 rung and the whole uncached passes. Attention is sdpa, as the library chooses for real models:
with eager attention one float64 pass holds every layer's 4,096 × 4,096 weights, 1.2 GB for this model, cache or
no cache, audit or none. It takes a quarter of an hour. Needs kvproof[transformers].
"""

import argparse
import multiprocessing
import resource
import sys

import torch

from kvproof._engine.audit import audit
from kvproof.scenarios import token_by_token
from kvproof.subjects._transformers import TransformersSubject, tiny_model

VOCABULARY = 262_144
BUDGET_BYTES = 1.5e9


def peak_bytes(audited: bool, length: int) -> int:
    """Return this process's peak of resident memory after stepping through the tokens, or auditing them."""
    model = tiny_model("llama", seed=0, overrides={"vocab_size": VOCABULARY, "max_position_embeddings": length})
    model.set_attn_implementation("sdpa")
    subject = TransformersSubject(model, name="llama with a large vocabulary")
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
    if audited:
        report = audit(subject, [token_by_token(ids)], all_values=False)
        if not report.verdict.passes:
            raise SystemExit(f"the benchmark's model does not pass: {report.summary}")
    else:
        session = subject.session()
        for token in ids:
            session.extend([[token]])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> int:
    """Print the peaks; return 1 if the difference is beyond its budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096, help="tokens (default 4096)")
    length = parser.parse_args().length
    context = multiprocessing.get_context("spawn")
    with context.Pool(1, maxtasksperchild=1) as pool:
        by_hand, audited = pool.starmap(peak_bytes, [(False, length), (True, length)], chunksize=1)
    extra = audited - by_hand
    print(
        f"vocabulary {VOCABULARY}, {length} tokens, float32 with its float64 rung: "
        f"steps by hand {by_hand / 1e9:.2f} GB, audited {audited / 1e9:.2f} GB, "
        f"extra {extra / 1e9:.2f} GB of {BUDGET_BYTES / 1e9:.1f} GB allowed"
    )
    return int(extra > BUDGET_BYTES)


if __name__ == "__main__":
    sys.exit(main())
