"""How far merged images are from plain ones: drawing, measures, report."""
