"""How far merged pictures are from plain ones, and how that is shown."""
