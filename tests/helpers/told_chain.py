"""A chain whose lengths a test gives."""


class Told:
    """A chain that takes the given lengths in turn, and collects in ``rounds`` the arguments of each ``record``."""

    speculates = True

    def __init__(self, lengths):
        self._lengths, self.rounds = lengths, []

    def begin(self):
        pass

    def next(self):
        return self._lengths[len(self.rounds) % len(self._lengths)]

    def record(self, *told):
        self.rounds.append(told)
