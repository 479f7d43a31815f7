"""The scale benchmark: what many clients on one machine cost, and how fast they are together.

For each number of clients and in each round: so many programs are started at once under a daemon that has a worker ready
for each, and under one that has a single worker ready, and natively. Reported, with medians over all clients and rounds
and their lowest and highest: the time until a process has a context; memory of a worker that is ready, that has an idle
client, and that is launching; and the rate at which all together launch empty kernels.
"""

import json
import os
import subprocess
import tempfile
import time

from bench_common import Daemon, about, is_real, native_folder, parser, run, spread, write_json

CLIENTS = [1, 2, 4, 8, 16, 32]


def host_memory(pid):
    """MiB of a process's own: what would be free without it."""
    fields = {}
    try:
        for line in open(f"/proc/{pid}/smaps_rollup"):
            words = line.split()
            if words[0].endswith(":") and len(words) == 3:
                fields[words[0][:-1]] = int(words[1])
    except OSError:
        return None
    return (fields.get("Private_Clean", 0) + fields.get("Private_Dirty", 0)) / 1024


def gpu_in_use():
    """MiB in use on all GPUs: where processes are not told apart, as in containers."""
    done = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
                          capture_output=True, text=True)
    return sum(int(line) for line in done.stdout.split() if line.isdigit())


def gpu_now(real):
    return gpu_in_use() if real else 0


def serving(stage, daemon):
    """The workers that have a client."""
    done = subprocess.run([f"{stage}/bin/rekindle", "ps", "--json", "--socket", daemon.socket], check=True,
                          capture_output=True, text=True)
    return [client["worker"] for client in json.loads(done.stdout)]


def children_of(daemon):
    children = open(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read().split()
    # Threads start workers: each thread has children of its own.
    for thread in os.listdir(f"/proc/{daemon.process.pid}/task"):
        try:
            children += open(f"/proc/{daemon.process.pid}/task/{thread}/children").read().split()
        except OSError:
            pass
    return sorted({int(pid) for pid in children})


class Memory:
    """Memory of workers in their states."""

    def __init__(self):
        self.host, self.gpu = {}, {}

    def look(self, state, pids, in_use):
        """`in_use` is what all of these together have of the GPU."""
        sizes = [host_memory(pid) for pid in pids]
        self.host.setdefault(state, []).extend(size for size in sizes if size is not None)
        self.gpu.setdefault(state, []).append(in_use / len(pids))

    def figures(self, real):
        figures = {f"worker_host_mib_{state}": spread(sizes) for state, sizes in self.host.items() if sizes}
        if real:
            figures.update({f"worker_gpu_mib_{state}": spread(sizes) for state, sizes in self.gpu.items()})
        return figures


class Group:
    """Programs that were started at once."""

    def __init__(self, count, rate, folder, environment):
        self.folder = tempfile.mkdtemp(dir=folder)
        self.go = os.path.join(self.folder, "go")
        self.ready = [os.path.join(self.folder, f"ready-{i}") for i in range(count)]
        self.programs = [subprocess.Popen(rate + ["--ready", ready, "--go", self.go], env=environment, text=True,
                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) for ready in self.ready]

    def wait_ready(self):
        deadline = time.monotonic() + 300
        while not all(os.path.exists(ready) for ready in self.ready):
            for program in self.programs:
                if program.poll() not in (None, 0):
                    raise SystemExit(f"bench: a program ended with {program.returncode}: {program.stderr.read()}")
            if time.monotonic() > deadline:
                raise SystemExit("bench: programs do not come up")
            time.sleep(0.002)

    def launch(self):
        open(self.go, "w").close()

    def finish(self):
        results = []
        for program in self.programs:
            out, err = program.communicate(timeout=600)
            if program.returncode != 0:
                raise SystemExit(f"bench: a program ended with {program.returncode}: {err}")
            results.append(json.loads(out))
        return results


def rate_of(results):
    """Of all together: from the first one's first launch to the last one's end."""
    time_ns = max(result["end_ns"] for result in results) - min(result["begin_ns"] for result in results)
    return sum(result["launches"] for result in results) / (time_ns / 1e9)


def measure(o, count, real, folder):
    """All figures of one number of clients."""
    rate = [f"{o.stage}/share/rekindle/apps/rate", "--milliseconds", "1000" if real else "300"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("REKINDLE_", "LD_"))}
    memory, ready, cold, native, ours, alone = Memory(), [], [], [], [], []
    for _ in range(o.rounds):
        empty = gpu_now(real)
        daemon = Daemon(o.stage, o.driver, folder, spare=count)
        try:
            daemon.wait_workers(count)
            workers = children_of(daemon)
            spare = gpu_now(real) - empty
            memory.look("ready", workers, spare)
            env = dict(clean, LD_LIBRARY_PATH=f"{o.stage}/lib/rekindle", REKINDLE_SOCKET=daemon.socket)
            group = Group(count, rate, folder, env)
            group.wait_ready()
            # The pool has been filled again: that is not counted.
            daemon.wait_workers(2 * count)
            workers = serving(o.stage, daemon)
            memory.look("idle_client", workers, gpu_now(real) - empty - spare)
            group.launch()
            time.sleep(0.1)
            memory.look("launching", workers, gpu_now(real) - empty - spare)
            results = group.finish()
            ready += [result["attach_ns"] / 1e6 for result in results]
            ours.append(rate_of(results))
        finally:
            daemon.stop()
        daemon = Daemon(o.stage, o.driver, folder, spare=1)
        try:
            daemon.wait_workers(1)
            env = dict(clean, LD_LIBRARY_PATH=f"{o.stage}/lib/rekindle", REKINDLE_SOCKET=daemon.socket)
            group = Group(count, rate, folder, env)
            group.wait_ready()
            group.launch()
            cold += [result["attach_ns"] / 1e6 for result in group.finish()]
        finally:
            daemon.stop()
        group = Group(count, rate, folder, dict(clean, LD_LIBRARY_PATH=native_folder(o.stage, o.driver)))
        group.wait_ready()
        group.launch()
        results = group.finish()
        alone += [result["attach_ns"] / 1e6 for result in results]
        native.append(rate_of(results))
    figures = {"attach_ms": spread(ready), "attach_ms_one_ready": spread(cold), "attach_ms_native": spread(alone),
               "launches_per_s": spread(ours), "launches_per_s_native": spread(native)}
    figures.update(memory.figures(real))
    return figures


def main():
    o = parser().parse_args()
    real = is_real(o.driver)
    most = int(os.environ.get("REKINDLE_BENCH_CLIENTS", CLIENTS[-1]))
    by_count = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in [count for count in CLIENTS if count <= most]:
            by_count[count] = measure(o, count, real, folder)
            print(f"{count} clients: " + ", ".join(
                f"{name} {figure['median']:.4g} ({figure['low']:.4g}..{figure['high']:.4g})"
                for name, figure in by_count[count].items()), flush=True)
    micro = [f"{o.stage}/share/rekindle/apps/micro", "--max-mib", "1", "--repeats", "3", "--burst", "10"]
    device = json.loads(run(micro, native_folder(o.stage, o.driver)))["device"]
    write_json(o.out, {**about(o, "scale", device), "rounds": o.rounds, "clients": by_count})


main()
