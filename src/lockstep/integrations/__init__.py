"""Lockstep inside other trainers: one file each, which plugs the package into the trainer's hooks.

A file imports its trainer and holds nothing that the package lacks elsewhere.
"""
