"""The benchmark `overhead`: PyTorch natively and under Rekindle, in one run, by turns.

For each workload (overhead_work.py) one process runs natively and one under Rekindle, both at once; they are told by turns
to do a block of steps, so only one uses the GPU at a time. Reported are the medians over all blocks of each, their lowest
and highest, and the ratio; and how long a process takes from its start to its first result.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time

from bench_common import Daemon, about, is_real, parser, spread, write_json

HERE = os.path.dirname(os.path.abspath(__file__))
BLOCK_S = 0.4  # about how long a block of steps is


class Process:
    """A workload's process, native or under Rekindle."""

    def __init__(self, name, stage, socket):
        env = dict(os.environ)
        if socket:
            before = env.get("LD_LIBRARY_PATH")
            env["LD_LIBRARY_PATH"] = f"{stage}/lib/rekindle" + (f":{before}" if before else "")
            env["REKINDLE_SOCKET"] = socket
        self.name = name
        self.begin = time.monotonic()
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen([sys.executable, f"{HERE}/overhead_work.py", name], env=env, text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors)

    def line(self):
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.errors.seek(0)
            raise RuntimeError(f"{self.name} ends with {self.process.returncode}: {self.errors.read()[-1500:]}")
        return line

    def block(self, steps):
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return json.loads(self.line())

    def stop(self):
        self.process.kill()
        self.process.wait()


def measure(name, stage, daemon, rounds):
    """Nanoseconds per step, native and under Rekindle."""
    two = {}
    try:
        for way, socket in (("native", None), ("rekindle", daemon.socket)):
            two[way] = Process(name, stage, socket)
        samples = {way: [] for way in two}
        for process in two.values():
            process.line()
        steps = 2
        for way in two:
            two[way].block(3)  # warm: memory, algorithms
        once = sum(two["native"].block(steps)) / len(two["native"].block(1))
        steps = max(2, min(2000, int(BLOCK_S * 1e9 / max(once, 1))))
        for process in two.values():
            process.block(steps)
        for turn in range(rounds):
            for way in list(two) if turn % 2 == 0 else list(two)[::-1]:
                samples[way].append(statistics.median(two[way].block(steps)))
        return samples, steps
    finally:
        for process in two.values():
            process.stop()


def starts(stage, daemon, rounds):
    """Nanoseconds from a process's start to its first result, its end included."""
    samples = {"native": [], "rekindle": []}
    for _ in range(rounds):
        for way, socket in (("native", None), ("rekindle", daemon.socket)):
            process = Process("start", stage, socket)
            process.line()
            samples[way].append((time.monotonic() - process.begin) * 1e9)
            process.process.wait()
    return samples, 1


def main():
    o = parser("only").parse_args()
    if not is_real(o.driver):
        raise SystemExit("bench: PyTorch needs a real GPU")
    from overhead_work import WORKLOADS  # here, since it needs PyTorch
    results, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(o.stage, o.driver, folder, spare=2)
        try:
            daemon.wait_workers(2)
            for name in [*WORKLOADS, "start"]:
                if o.only and not re.search(o.only, name):
                    continue
                try:
                    samples, steps = starts(o.stage, daemon, 5) if name == "start" else \
                        measure(name, o.stage, daemon, 2 * o.rounds)
                except (RuntimeError, OSError) as error:
                    failed.append({"name": name, "error": str(error)})
                    print(f"bench: {name}: {error}", flush=True)
                    continue
                native, ours = spread(samples["native"]), spread(samples["rekindle"])
                ratio = ours["median"] / native["median"]
                results.append({"name": name, "steps_a_block": steps, "native_ns": native, "rekindle_ns": ours, "ratio": ratio})
                print(f"bench: {name:34} native {native['median'] / 1e6:10.3f} ms ({native['low'] / 1e6:.3f}-{native['high'] / 1e6:.3f})"
                      f"  Rekindle {ours['median'] / 1e6:10.3f} ms ({ours['low'] / 1e6:.3f}-{ours['high'] / 1e6:.3f})  {ratio:.3f}", flush=True)
        finally:
            daemon.stop()
    write_json(o.out, {**about(o, "overhead"), "workloads": results, "failed": failed})
    print(f"bench: {o.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
