"""Shared by all tests: what is set before torch starts."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What a run asks for at its start (`ops.invariant.ask_for_reproducible_gemm`) must stand before the
# first GEMM of the process, and here other tests come first.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

from lockstep.ops.invariant import ask_for_reproducible_gemm

ask_for_reproducible_gemm()  # read at the first GEMM of the process, whichever test that is in
