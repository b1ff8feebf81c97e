"""EAGLE-3, P-EAGLE, and EAGLE 1 and 2 (HASS has the same files). ``dialects.py`` reads them in any dialect, ``head.py``
computes them."""
