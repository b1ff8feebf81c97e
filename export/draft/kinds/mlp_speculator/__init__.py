"""MLP speculators, which IBM publishes as accelerators. Each proposal has a stage, which turns the previous state and
the embedding of the previous token into the next state. There is no attention, so no cache and no seeding."""
