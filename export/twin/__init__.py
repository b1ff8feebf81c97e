"""The twin check of a target: what an export would compute, held against what it should, before any weight is read.

The user's own configuration is shrunk (sizes cut, every other field kept), filled with random weights and computed
twice, by transformers' own model and by ours (``target.py``). A list of known fields cannot say what a configuration
means; behaviour can. The twins of draft heads are in their kinds' folders (``draft/kinds/``).
"""
