"""The engine: audits a subject through the seam, and knows no adapter."""
