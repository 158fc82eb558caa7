"""Generate with a KV cache, after proving that the cache changes nothing.

Recreates the trained checkpoint, checks every prefix, breaks the cache twice on purpose, reports the
cache's memory, and generates greedily and from a seed, with and without the cache.
"""

import kvproof
from kvproof import faults
from kvproof.reference import Checkpoint, train
from kvproof.reference.corpus import BOS_ID, EOS_ID, SEQUENCES
from kvproof.scenarios import token_by_token

# 1. Recreate the frozen checkpoint: deterministic, a few seconds.
decoder, loss = train()
subject = kvproof.ReferenceSubject(Checkpoint(decoder=decoder, seed=1, loss=loss))
print(f"trained to {loss:.5f} nats per position")

# 2. Compare the cached path with the uncached one at every prefix, over the whole vocabulary. Then break
#    the cached path on purpose: a check that never rejects a broken cache is weak evidence.
tolerance = kvproof.Tolerance(dtype="float32", absolute=1e-5, relative=0.0, source="this checkpoint, on a CPU")
report = kvproof.audit(
    subject,
    scenarios=[token_by_token(sequence) for sequence in SEQUENCES],
    faults=[faults.wrong_position(), faults.wrong_layer()],
    tolerance=tolerance,
    reference="literal",
)
for row in report.scenarios[0].rows:
    print(f"{row.tokens:12} gap {row.gap:.4e}  allowed {row.allowed:.0e}  {row.verdict}")
assert report.verdict is kvproof.Verdict.MATCH
for fault in report.faults:
    print(f"{fault.name}: gap {fault.largest_gap:.3g}; {fault.divergence.sentence}")
    print(f"    likely cause: {fault.divergence.contract}")
    assert fault.caught
    assert fault.right_stage

# 3. What the cache costs.
memory = kvproof.cache_memory(subject)
print(f"cache: {memory.bytes_per_token} bytes a token, {memory.bytes_full_context} for the full context")

# 4. Generate: the policy stands outside the model, and each request owns its cache and its generator.
for policy in (kvproof.Greedy(), kvproof.Sample(temperature=1.0, top_k=3, seed=41)):
    cached, uncached = (
        kvproof.generate(subject, (BOS_ID,), policy, kvproof.Stops(eos_id=EOS_ID), path=path)
        for path in ("cached", "uncached")
    )
    assert cached.returned == uncached.returned
    assert kvproof.replay(cached, subject).problem is None
    print(f"{policy.kind}: {cached.end.tokens} (stopped by {cached.end.stop_reason})")
    for step in cached.steps:
        kept = "  ".join(f"{entry.token} {entry.value:.4f}" for entry in step.probabilities[:3])
        print(f"    position {step.position}: {kept}  ->  {step.chosen_token}")
