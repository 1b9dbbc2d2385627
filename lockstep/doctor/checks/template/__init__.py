"""Checks of rows against what a template makes of their messages."""
