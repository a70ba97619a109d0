"""A run replayed from its tape: the same decisions from the same events, and the same weights, bit for bit."""
