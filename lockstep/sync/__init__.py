"""From the trainer's weights to the engine's: handed over by version."""
