"""Checks of the log-probs: what they are of, and how exactly they were kept."""
