"""A chain length that a test tells."""


class Told:
    """Chain lengths in turn; ``rounds``: what was told of each."""

    speculates = True

    def __init__(self, lengths):
        self._lengths, self.rounds = lengths, []

    def begin(self):
        pass

    def next(self):
        return self._lengths[len(self.rounds) % len(self._lengths)]

    def record(self, *told):
        self.rounds.append(told)
