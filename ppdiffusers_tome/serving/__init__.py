"""Generate images with an exported folder: from a file of prompts, or over HTTP.

Requests and prompts become jobs, similar jobs share a call, and one thread runs the model.
"""
