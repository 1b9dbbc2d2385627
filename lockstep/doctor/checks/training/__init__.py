"""Checks of what training did with the rows: ages, the update itself, and figures by step."""
