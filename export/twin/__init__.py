"""The twin check of a target, which compares an export's computation with transformers' before any weight is read.

The sizes in the user's configuration are cut, and every other field is kept. A small model with this configuration and
random weights is computed twice, by transformers' model and by the export's (``target.py``). Unlike a list of known
fields, a comparison of outputs shows whether every field has its effect. That of a Gemma 4 assistant is in
``draft/kinds/gemma4_assistant/``; other heads are compared with formulas in tests (``tests/oracle/``).
"""
