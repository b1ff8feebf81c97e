"""A scripted target, and drafts that propose right or wrong tokens."""

from scripted import VOCABULARY


def greedy(prefix):
    return (7 * prefix[-1] + 3 * len(prefix) + prefix[0]) % VOCABULARY


def wrong(prefix):
    return (greedy(prefix) + 1) % VOCABULARY


def right_at(*offsets):
    """Return a draft that proposes the right token if the prefix length modulo 4 is in ``offsets``."""
    return lambda prefix: greedy(prefix) if len(prefix) % 4 in offsets else wrong(prefix)


PROMPT = [3, 1, 4, 1, 5, 9, 6]
