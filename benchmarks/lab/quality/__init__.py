"""How far merged images are from plain ones: generation, measures, report."""
