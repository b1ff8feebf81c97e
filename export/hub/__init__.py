"""Takes checkpoints by their names on the Hugging Face hub, from the cache or by download; a dry run reads only
headers."""
