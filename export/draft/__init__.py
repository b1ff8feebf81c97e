"""Draft heads: ``reading.py`` reads a checkpoint of any kind and dialect into one description, ``loading.py`` makes its
module, and ``twin.py`` compares a small copy of it with the formulas of its kind. Each kind is a folder in
``kinds``."""
