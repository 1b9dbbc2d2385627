"""Hypotheses: each file predicts log-probs as one cause would change them."""
