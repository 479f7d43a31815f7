"""What a program in Python may tell Rekindle: copy this file, or take from it what you need.

    from rekindle import checkpoint

    for batch in loader:
        checkpoint()        # at the start of an iteration
        ...

SPDX-License-Identifier: MIT OR Apache-2.0
"""

import ctypes
import os


def _find():
    # Only where it is loaded already: a program that uses no GPU has nothing to say.
    try:
        return ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD).rekindle_checkpoint
    except (OSError, AttributeError):
        return None


_call = None


def checkpoint():
    """If a checkpoint is wanted, now is a good moment. Returns whether one has begun, without waiting for its copy."""
    global _call
    if _call is None:
        _call = _find()
    return _call is not None and _call() == 1
