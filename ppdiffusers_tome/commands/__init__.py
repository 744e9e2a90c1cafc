"""The commands of `python -m ppdiffusers_tome`: their options, which are read without Paddle, and what they run."""
