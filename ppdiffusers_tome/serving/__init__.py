"""Serve an exported pipeline over HTTP: requests become jobs, similar jobs share a call, one thread runs the model."""
