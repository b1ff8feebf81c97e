"""Rounds of a scripted target and draft, and what greedy decoding gives."""

from scripted import VOCABULARY


def greedy(prefix):
    return (7 * prefix[-1] + 3 * len(prefix) + prefix[0]) % VOCABULARY


def wrong(prefix):
    return (greedy(prefix) + 1) % VOCABULARY


def right_at(*offsets):
    """A draft that is right where the prefix length modulo 4 is among ``offsets``."""
    return lambda prefix: greedy(prefix) if len(prefix) % 4 in offsets else wrong(prefix)


PROMPT = [3, 1, 4, 1, 5, 9, 6]
