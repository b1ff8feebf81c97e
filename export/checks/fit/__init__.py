"""Measures, on both models' weights, how a draft head is to be read and what it is worth (``measure.py``)."""
