"""The twin check: what an export would compute, held against what it should, before any weight is read.

The user's own configuration is shrunk (sizes cut, every other field kept), filled with random weights and computed
twice: a target by transformers' own model and by ours (``target.py``), a draft head by its dialect's formulas and by
ours (``draft.py``). A list of known fields cannot say what a configuration means; behaviour can.
"""
