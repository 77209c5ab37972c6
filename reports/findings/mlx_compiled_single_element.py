"""A compiled function that sums over an axis of one element ends the process on the CPU.

Library: mlx 0.32.4
Law: log_softmax/equals-the-reference, log_softmax/minus-infinity-equals-deletion
Where: mlx:default
Input: mlx.nn.log_softmax of float32 [[0]]; smaller: x - sum(x) under mx.compile(shapeless=True)
Got: SIGSEGV
Wanted: [[0]] (uncompiled, the same lines give it)
Status: theirs, new
Tracker: none found (https://github.com/ml-explore/mlx/pull/3672 changed how such sums are compiled)
Searched: "log_softmax segfault CPU logsumexp axis size 1" in issues;
"mx.compile shapeless CPU segmentation fault reduction size one axis" in issues
"""

import subprocess
import sys

import mlx.core  # noqa: F401  the call is made in a process of its own, which ends with it

CALL = """
import mlx.core as mx
import mlx.nn as nn
print(nn.log_softmax(mx.array([[0.0]])).tolist())
"""
ended = subprocess.run([sys.executable, "-c", CALL], capture_output=True, text=True)
print("got exit code", ended.returncode, ended.stdout.strip(), "wanted 0 and [[0.0]]")
wrong = ended.stdout.strip() != "[[0.0]]"
sys.exit(1 if ended.returncode < 0 else ended.returncode or wrong)
