"""Gemma 4 assistants, the drafters that Google publishes beside the models (MTP in vLLM).

A head takes the embedding of the newest token and the target's final state at the position before it. Its layers have
only queries, which attend to the keys and values in the target's caches. So it has no cache and needs no seeding.
"""
