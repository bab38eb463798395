"""Helps to test training code without a cluster: functions on CPU ranks, and checks for what a test leaves behind.

`ranks` runs a plain function on several gloo ranks and returns the results by rank. `leaks` compares a process
before and after a test. Nothing here is used in training.
"""

from __future__ import annotations
