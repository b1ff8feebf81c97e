"""Checkpoints by their names on the Hugging Face hub: in the cache, downloaded, or by their headers alone."""
