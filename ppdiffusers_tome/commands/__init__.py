"""The commands of `python -m ppdiffusers_tome`, one file each: their options, and the call they stand for."""
