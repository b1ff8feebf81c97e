"""DFlash heads and their variants DFlash2, DSpark, xPress and Domino, which draft a block of tokens in one forward. A
block is the anchor followed by mask tokens. Its rows attend to each other, and to keys and values that every layer
computes from the target's taps. Source: arXiv 2602.06036; speculators' classes of the same names, whose outputs are in
tests/golden/dflash; z-lab's ``dflash/model.py`` for the files of its own dialect.
"""
