"""Closed-form machine unlearning (GROM) and process sidecars: the companion library of the book."""

__version__ = "0.1.0"
