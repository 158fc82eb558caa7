"""Renderers: each is a pure function of a report, and one file."""
