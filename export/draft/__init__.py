"""Draft heads: ``reading.py`` reads a checkpoint of any dialect (a file each in ``dialects``) into one description
(``description.py``), ``head.py`` is the module, ``formulas.py`` what it is held against."""
