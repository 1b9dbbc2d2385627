"""Scores rows by a model: `model` without torch, `scorer` with it."""
