"""Shrinking: from a finding to the simplest file that shows it without kvproof."""
