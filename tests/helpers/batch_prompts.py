"""Writes a file with prompts of every form."""

PROMPTS = [
    {"prompt_tokens": [2, 318, 1664, 11]},
    {"prompt": "def main(argv=None):\n    ", "id": "text"},
    {"turns": ["import os", "x = 1", "import sys"]},
]
