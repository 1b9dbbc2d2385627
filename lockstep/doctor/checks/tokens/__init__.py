"""Checks of the ids, and of what stands beside which."""
