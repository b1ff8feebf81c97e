"""Draft heads: ``reading.py`` reads a checkpoint of any kind and dialect into one description, ``loading.py`` makes its
module. Each kind is a folder in ``kinds``."""
