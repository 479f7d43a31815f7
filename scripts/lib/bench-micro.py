"""The micro benchmark: what a call costs under Rekindle beside what it costs natively, in one run.

Each round runs the program `micro` natively and under Rekindle, and starts `firstkernel` several times each, in turn.
Reported are the medians over rounds of each figure's median, their lowest and highest, and the ratio to native.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time

STARTS = 5


def spread(values):
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


class Daemon:
    """A daemon on a socket of its own, with spare workers ready."""

    def __init__(self, stage, driver, folder):
        self.socket = os.path.join(folder, "rekindled.sock")
        self.log_path = os.path.join(folder, "daemon.log")
        self.log = open(self.log_path, "w")
        self.process = subprocess.Popen(
            [f"{stage}/bin/rekindled", "--socket", self.socket, "--cuda-driver", driver],
            stdout=self.log, stderr=self.log, env=dict(os.environ, REKINDLE_LOG="info"))
        self.ready = 0

    def wait_ready(self):
        """Waits until a worker has become ready since the last call."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            ready = open(self.log_path).read().count("a worker is ready")
            if ready > self.ready:
                self.ready = ready
                return
            time.sleep(0.02)
        raise SystemExit("bench: no worker became ready; the daemon says:\n" + open(self.log_path).read()[-2000:])

    def stop(self):
        self.process.terminate()
        self.process.wait()


def run(command, library, socket=None):
    env = dict(os.environ, LD_LIBRARY_PATH=library)
    if socket:
        env["REKINDLE_SOCKET"] = socket
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise SystemExit(f"bench: {' '.join(command)} failed ({done.returncode}): {done.stdout}{done.stderr}")
    return done.stdout


def start_ms(command, library, socket=None):
    """From the program's start to its first kernel's result, as the program says, and to its end."""
    begin = time.monotonic()
    out = run(command, library, socket)
    assert "ok" in out, out
    return (time.monotonic() - begin) * 1e3


def flatten(result):
    """The figures of one run of `micro` by name; times in ns, bandwidths in GB/s."""
    figures = {k: v["median"] for k, v in result.items() if isinstance(v, dict) and "median" in v}
    figures["init_to_first_kernel"] = result["first_kernel_ns"]
    for copy in result["copies"]:
        name = f"{copy['memory']}_{copy['direction']}_{copy['bytes']}"
        figures[name] = copy["gb_per_s"]["median"]
    return figures


def main():
    parser = argparse.ArgumentParser()
    for option in ("stage", "driver", "out", "rounds", "commit", "version"):
        parser.add_argument(f"--{option}", required=True)
    o = parser.parse_args()
    real = "simgpu" not in o.driver
    native = os.path.dirname(os.path.realpath(o.driver)) if real else f"{o.stage}/lib/rekindle/simgpu"
    if real:
        native = os.path.dirname(o.driver)
    ours = f"{o.stage}/lib/rekindle"
    apps = f"{o.stage}/share/rekindle/apps"
    micro = [f"{apps}/micro"]
    if not real:
        micro += ["--max-mib", "8", "--repeats", "5", "--burst", "50"]
    samples = {"native": [], "rekindle": []}
    starts = {"native": [], "rekindle": []}
    with tempfile.TemporaryDirectory() as folder:
        daemon = Daemon(o.stage, o.driver, folder)
        try:
            for _ in range(int(o.rounds)):
                samples["native"].append(flatten(json.loads(run(micro, native))))
                daemon.wait_ready()
                samples["rekindle"].append(flatten(json.loads(run(micro, ours, daemon.socket))))
                for _ in range(STARTS):
                    starts["native"].append(start_ms([f"{apps}/firstkernel"], native))
                    daemon.wait_ready()
                    starts["rekindle"].append(start_ms([f"{apps}/firstkernel"], ours, daemon.socket))
        finally:
            daemon.stop()
        device = json.loads(run(micro[:1] + ["--max-mib", "1", "--repeats", "3", "--burst", "10"], native))["device"]
    figures = {}
    for name in samples["native"][0]:
        n = spread([s[name] for s in samples["native"]])
        r = spread([s[name] for s in samples["rekindle"]])
        figures[name] = {"native": n, "rekindle": r, "ratio": r["median"] / n["median"],
                         "unit": "GB/s" if name[-1].isdigit() else "ns"}
    n, r = spread(starts["native"]), spread(starts["rekindle"])
    figures["process"] = {"native": n, "rekindle": r, "ratio": r["median"] / n["median"], "unit": "ms"}
    driver_version = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                                    capture_output=True, text=True).stdout.split("\n")[0] if real else "software GPU"
    document = {
        "benchmark": "micro", "date": datetime.date.today().isoformat(), "commit": o.commit, "version": o.version,
        "device": device, "driver": driver_version, "kernel": platform.release(), "cores": os.cpu_count(),
        "rounds": int(o.rounds), "worker_spin_us": 200, "worker_wait_spin_us": 20000, "caller_spin_us": 2000,
        "figures": figures,
    }
    with open(o.out, "w") as out:
        json.dump(document, out, indent=1)
        out.write("\n")
    print(f"{device}, driver {driver_version}, {o.rounds} rounds")
    print(f"{'':28} {'native':>28} {'rekindle':>28}   ratio")
    for name, f in figures.items():
        row = [f"{s['median']:.4g} ({s['low']:.4g}..{s['high']:.4g})" for s in (f["native"], f["rekindle"])]
        print(f"{name:28} {row[0]:>28} {row[1]:>28} {f['ratio']:7.3f}  {f['unit']}")


main()
