"""Draft heads: ``reading.py`` reads a checkpoint of any kind and dialect into one description, ``loading.py`` makes its
module, ``twin.py`` holds a small copy of it against its formulas. Each kind is a folder in ``kinds``."""
