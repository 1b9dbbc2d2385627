"""What can be said with the model at hand: both sides scored again, and by what would explain them.

`weights` says which weights there are, `scorer` computes (the one module with torch), `compare`
decides which side deviates and by what, `checks` are the findings. Without a model none of it runs.
"""
