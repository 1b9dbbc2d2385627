"""Hands the trainer's weights to the engine, by version."""
