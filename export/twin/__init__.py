"""The twin check of a target, which compares an export's computation with transformers' before any weight is read.

The user's own configuration is shrunk (sizes cut, every other field kept). A small model with this configuration and
random weights is computed twice, by transformers' own model and by ours (``target.py``). A list of known fields would
not show how a configuration is computed; a comparison of outputs does. The twins of draft heads are in their kinds'
folders (``draft/kinds/``).
"""
