"""Finds checkpoints by their names on the Hugging Face hub, in the cache or by download; a dry run reads only
headers."""
