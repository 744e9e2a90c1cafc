"""The version, in its one place: setup.py reads it here."""

__version__ = "0.5.0"
