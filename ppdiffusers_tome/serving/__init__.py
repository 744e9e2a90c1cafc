"""Serve an exported pipeline: requests become jobs, agreeing jobs are drawn together, one thread does the drawing."""
