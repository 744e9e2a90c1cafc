"""Time and memory: arms of merging and attention against each other, in turns."""
