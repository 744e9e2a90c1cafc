"""Attach merging to a model and remove it: wraps around the `forward` of its layers. Imports methods and families.

`placement` knows what merges in a block, and `passes` computes it in each pass; nothing else does.
"""
