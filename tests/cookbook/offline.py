"""Runs compare_sampling_training_logprobs.py with a document of this machine in place of the one
that it downloads: python offline.py FILE key=value ..."""

import asyncio
import runpy
import sys

import chz

DOCUMENT = "What is 4 + 5? 9. " * 20

if __name__ == "__main__":
    path = sys.argv.pop(1)
    program = runpy.run_path(path)
    program["get_row"].__globals__["get_reference_document"] = lambda: DOCUMENT
    asyncio.run(chz.nested_entrypoint(program["main"]))
