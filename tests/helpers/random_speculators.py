"""Makes random but deterministic targets, drafts, and requests to them."""

from scripted import VOCABULARY, scripted_metadata

from eagle3.runner.loop.generation import complete, generate

FEW = 3  # token ids, so few that different texts soon agree again


class Failure(Exception):
    """Raised by a method that fails."""


class InTurn:
    """A chain that takes the given lengths in turn."""

    speculates = True

    def __init__(self, lengths):
        self._lengths, self._rounds = lengths, 0

    def begin(self):
        pass

    def next(self):
        self._rounds += 1
        return self._lengths[self._rounds % len(self._lengths)]

    def record(self, proposed, accepted, seconds):
        pass


def random_metadata(random):
    """Return random metadata, with no windows or windows hardly longer than a verify window and a P-EAGLE's mask rows.
    Every other target is recurrent: its chunks are longer than the rows that it can roll back."""
    chain_len = random.randint(1, 5)
    proposals = random.choice([1, chain_len])
    rollback = random.choice([None, chain_len + random.randint(1, 3)])
    shortest = chain_len if rollback is None else rollback + 1
    window, draft_window = (random.choice([0, shortest + random.randint(1, 6)]) for _ in range(2))
    most = min(window or 14, draft_window or 14)
    min_prefill = random.randint(2, most) if rollback is None else random.randint(rollback + 1, most)
    return scripted_metadata(
        max_seq_len=random.randint(20, 64),
        min_prefill=min_prefill,
        max_prefill=random.randint(min_prefill, most),
        chain_len=chain_len,
        window=window,
        draft_window=draft_window and draft_window + proposals - 1,
        proposals=proposals,
        rollback_rows=rollback,
    )


def random_speculator(random):
    table, luck = [random.randrange(FEW) for _ in range(40)], random.choice([0.2, 0.5, 0.9])
    hits = [random.random() < luck for _ in range(17)]

    def target(prefix):
        return table[(3 * prefix[-1] + 5 * len(prefix) + prefix[len(prefix) // 2]) % 40]

    def draft(prefix):
        right = target(prefix)
        return right if hits[(len(prefix) + prefix[-1]) % 17] else (right + 1) % VOCABULARY

    return target, draft


def random_request(random, metadata, said):
    """Return a random prompt that begins like an earlier text in ``said``, and random options for ``generate``."""
    earlier = random.choice(said)
    kept = earlier[: random.choice([len(earlier), random.randint(0, len(earlier))])]
    more = [random.randrange(FEW) for _ in range(random.randint(not kept, random.choice([3, 30])))]
    lengths = [random.randint(0, metadata.chain_len) for _ in range(random.randint(1, 4))]
    options = {
        "max_new_tokens": random.choice([1, random.randint(1, 30)]),
        "chain": random.choice([None, lengths[0], InTurn(lengths)]),
        "stop_ids": random.sample(range(FEW), random.choice([0, 0, 1])),
    }
    return (kept + more)[: metadata.max_seq_len - 1], options


def disturb(session, random):
    """Give a scripted session random methods, and a random failure after a random number of calls."""
    session.has_decode, session.has_speculate = random.random() < 0.5, random.random() < 0.5
    session.failure = random.choice([None, None, Failure(), KeyboardInterrupt()])
    session.calls_left, session.rows_written = random.randint(0, 15), random.randint(0, 8)


def generate_some(session, prompt, rounds, **options):
    """Return the tokens until the text ends, ``rounds`` rounds are done or a method fails, and True if the text
    ended."""
    steps, tokens = generate(session, prompt, **options), []
    try:
        for number, fresh in enumerate(steps):
            tokens += fresh
            if number == rounds:
                steps.close()
                return tokens, False
    except (Failure, KeyboardInterrupt):
        return tokens, False
    return tokens, True


def greedy(prefix):
    return (7 * prefix[-1] + 3 * len(prefix) + prefix[0]) % VOCABULARY


PROMPT = [(5 * i + 2) % VOCABULARY for i in range(24)]


def reused(session, cached, prompt, **options):
    return complete(session, prompt, cached=cached, **options).stats.reused_prompt_tokens
