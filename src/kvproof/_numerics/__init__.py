"""Numerics: how far two values are apart, and what rounding explains of it. Knows torch and no subject."""
