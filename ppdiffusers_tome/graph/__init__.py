"""Merge in ONNX programs that are plain: find self-attention, and leave out keys and values by new nodes.

Nothing here needs Paddle. The folder imports `errors`, `files`, `grid`, `methods`, `replacement`, `run` and `wording`.
"""
