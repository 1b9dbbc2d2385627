"""Checks with the model at hand: both sides are scored again, and by variants that may explain
them.

`weights` finds the weights, `scorer` computes (the one module with torch), `rescore` keeps the
sample and its scores, `compare` decides which side deviates and why, `judgements` are the findings.
"""
