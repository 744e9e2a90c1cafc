"""The models that merge: a table with one entry per family, and how it is read. Imports the grid and errors only.

All that this package knows of the inside of ppdiffusers' models stands here.
"""
