"""Attach merging to a model and remove it: wraps around the `forward` of its layers.

`placement` knows what merges in a block, and `passes` computes it in each pass; nothing else does. The folder imports
`errors`, `families`, `grid`, `methods` and `tensors`.
"""
