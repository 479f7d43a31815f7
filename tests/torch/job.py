"""What the programs here share: steps that a test can hold and count, and digests.

A program prints a digest of its state now and then and at its end, and nothing that differs from run to run; so two
runs can be compared by what they print. `--steps N` has it do so many. `--progress FILE` has it write the number of its
last finished step; while the file that APP_HOLD names says N, it waits before it goes on past step N (as tests/apps/app.h
has it for CUDA programs).
"""

import argparse
import hashlib
import os
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

_options = argparse.ArgumentParser()
_options.add_argument("--progress")
_options.add_argument("--steps", type=int)
OPTIONS = _options.parse_known_args()[0]


def count(usual):
    """How many steps there are to do."""
    return OPTIONS.steps or usual


def hold(step, says=True):
    """Says that `step` is done, unless another process does, and waits for as long as it may not go on."""
    if not OPTIONS.progress:
        return
    if says:
        with open(OPTIONS.progress + ".new", "w") as file:
            file.write(f"{step}\n")
        os.rename(OPTIONS.progress + ".new", OPTIONS.progress)
    name = os.environ.get("APP_HOLD")
    while name:
        try:
            with open(name) as file:
                if step < int(file.read() or 0):
                    return
        except (OSError, ValueError):
            return
        time.sleep(0.005)


def steps(usual):
    """The numbers of the steps, each followed by `hold`."""
    for step in range(1, count(usual) + 1):
        yield step
        hold(step)


def digest(*things):
    """Sixteen hexadecimal digits of the bytes of tensors and arrays, in order."""
    sum = hashlib.sha256()
    for thing in things:
        if hasattr(thing, "detach"):
            import torch
            thing = thing.detach().contiguous()
            if thing.is_complex():
                thing = torch.view_as_real(thing)
            thing = thing.cpu().reshape(-1).view(torch.uint8).numpy()
        sum.update(bytes(memoryview(thing).cast("B")) if hasattr(thing, "nbytes") else str(thing).encode())
    return sum.hexdigest()[:16]


def say(*words):
    print(*words, flush=True)


def deterministic(seed=1):
    """PyTorch without anything that may differ from run to run."""
    import torch
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    return torch


def libraries(*names):
    """Loads libraries of CUDA's wheels, which other libraries look for by their names alone. Where they are, in order."""
    import ctypes
    import glob

    import nvidia
    found = []
    for name in names:
        here = [path for folder in nvidia.__path__ for path in sorted(glob.glob(f"{folder}/*/lib/lib{name}.so.*"))]
        if not here:
            raise SystemExit(f"no wheel of CUDA has lib{name}.so")
        ctypes.CDLL(here[0])
        found.append(here[0])
    return found
