"""Measure what merging costs and saves."""
