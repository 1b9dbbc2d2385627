"""Runs programs that a model wrote, isolated and within limits."""
