"""Runs experiments of the benchmark `facts`: each in a process of its own, ended when its time is up."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import sinks

NOT_SUPPORTED = 77  # a program's exit status, see tests/facts/facts.h
AT_ONCE = 4


class Runner:
    def __init__(self, programs, driver, small, folder, deadline):
        self.programs, self.small, self.folder, self.deadline = programs, small, folder, deadline
        # One GPU: the driver takes seconds to start with eight.
        self.environment = {"CUDA_VISIBLE_DEVICES": "0", **os.environ, "LD_LIBRARY_PATH": os.path.dirname(os.path.abspath(driver))}
        self.waiting = threading.Lock()

    def run_all(self, chosen):
        """Pairs of an experiment and what came of it, None where there was no time for it."""
        for parallel, group in itertools.groupby(chosen, key=lambda it: it.parallel):
            group = list(group)
            with ThreadPoolExecutor(AT_ONCE if parallel else 1) as pool:
                yield from zip(group, pool.map(self.run, group))

    def run(self, experiment):
        if time.monotonic() > self.deadline:
            return None
        with self.place(experiment.place) as path:
            if experiment.place and path is None:
                return {"ended": "no such file system can be mounted here", "seconds": 0, "lines": []}
            return self.run_in(experiment, ["--file", path] if path else [])

    def run_in(self, experiment, more):
        # An experiment that begins late has less time, so that the run ends near its budget.
        limit = min(experiment.limit, max(15, self.deadline - time.monotonic()))
        arguments = [str(it) for it in experiment.arguments] + more + (["--small", "1"] if self.small else [])
        begin = time.monotonic()
        process = subprocess.Popen(
            [f"{self.programs}/{experiment.program}", *arguments], env=self.environment | experiment.environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            output, errors = process.communicate(timeout=limit)
            ended = how_ended(process.returncode)
        except subprocess.TimeoutExpired:
            # With its children, which are of its session.
            os.killpg(process.pid, signal.SIGKILL)
            output, errors = process.communicate()
            ended = f"did not end within {limit:.0f} s"
        run = {"ended": ended, "arguments": arguments, "seconds": round(time.monotonic() - begin, 2), "lines": parsed(output)}
        return run | ({"stderr": errors[-600:]} if errors else {})

    @contextlib.contextmanager
    def place(self, kind):
        """A path for an experiment's file; None without one, or where there is no such file system."""
        with contextlib.ExitStack() as stack:
            if kind in ("huge", "tmpfs"):
                found = stack.enter_context(sinks.in_memory(self.folder, kind == "huge"))
                if found is None and kind == "tmpfs":
                    found = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
            elif kind == "disk":
                found = stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp"))
            else:
                found = None
            yield found and f"{found}/facts"


def how_ended(status):
    if status == 0:
        return "ok"
    if status == NOT_SUPPORTED:
        return "not supported"
    return f"exit status {status}" if status > 0 else f"signal {-status}"


def parsed(output):
    """Lines of JSON; another line, such as the cut one of a program that was killed, as text."""
    lines = []
    for line in output.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            lines.append({"text": line})
    return lines
