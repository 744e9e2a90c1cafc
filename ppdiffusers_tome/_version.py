"""The version of the package; setup.py reads it from here."""

__version__ = "2.2.0"
