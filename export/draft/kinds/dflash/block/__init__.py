"""The core of the block family: the description, the layers, the keys that all variants have, the dialects, and the
base class of variants. It imports no variant."""
