"""How far merged images are from plain ones: what is generated, the perceptual distance, sheets."""
