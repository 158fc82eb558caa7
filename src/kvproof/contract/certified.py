"""What a certificate shows, in sentences."""

from kvproof.contract.results import Certificate


def reach_sentence(certificate: Certificate) -> str | None:
    """Return how far the programs with planted faults go, and how far the audit went; None if unknown."""
    reached, planted = certificate.reached, certificate.planted_in
    if reached is None or planted is None:
        return None
    parts = [
        f"sequences of up to {planted.num_tokens} tokens (the audit: {reached.num_tokens})",
        f"blocks of up to {planted.block_len} on a warm cache ({reached.block_len})",
    ]
    if reached.num_rows > 1:
        parts.append(f"batches of up to {planted.num_rows} rows ({reached.num_rows})")
    return f"planted in {', '.join(parts)}"
