"""Checkpoints by their names on the Hugging Face hub: from the cache, downloaded, or known by their headers alone."""
