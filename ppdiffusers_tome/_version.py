"""The version of the package; setup.py reads it from here."""

__version__ = "3.1.0"
