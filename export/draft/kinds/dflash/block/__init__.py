"""The core of the block family: the description, the layers, the keys that all have, what differs by dialect, and what
a variant may add. It imports no variant."""
