"""The models that merge: a table with one entry for each family of models, and the functions that read it.

All that the core knows about the inside of ppdiffusers' models is here. The folder imports `errors` and `grid`.
"""
