"""Dump formats: runs of Lockstep, dumps of other trainers, and rows in the doctor's own columns."""
