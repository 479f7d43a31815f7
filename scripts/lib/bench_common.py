"""What the benchmarks share: options, a daemon of their own, programs under it and natively, medians, the file of results."""

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import tempfile
import time


def spread(values):
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def parser(*more):
    """Of the options that `scripts/bench` gives every benchmark, and of more texts that may be given."""
    options = argparse.ArgumentParser()
    for name in ("stage", "driver", "out", "commit", "version"):
        options.add_argument(f"--{name}", required=True)
    options.add_argument("--rounds", type=int, required=True)
    for name in more:
        options.add_argument(f"--{name}")
    return options


def is_real(driver):
    """Whether it is NVIDIA's driver, and no software GPU."""
    return "simgpu" not in driver


def about(o, name, device=None):
    """What every file of results begins with: of what it is, and of which machine."""
    real = is_real(o.driver)
    return {"benchmark": name, "date": datetime.date.today().isoformat(), "commit": o.commit, "version": o.version,
            "device": device or asked_device("name", real), "driver": driver_version(real), "kernel": platform.release(),
            "cores": os.cpu_count()}


def write_json(path, document):
    """Whole, or not at all."""
    with open(path + ".new", "w") as file:
        json.dump(document, file, indent=1)
        file.write("\n")
    os.rename(path + ".new", path)


def asked_device(what, real):
    """What `nvidia-smi` says of the first GPU."""
    if not real:
        return "software GPU"
    done = subprocess.run(["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"], capture_output=True, text=True)
    return done.stdout.split("\n")[0]


def native_folder(stage, driver):
    """Where programs find the driver itself."""
    return os.path.dirname(driver) if is_real(driver) else f"{stage}/lib/rekindle/simgpu"


def driver_version(real):
    return asked_device("driver_version", real)


def criu_of(tree, folder):
    """A `criu` that runs outside the tree that it comes from: with the tree's libraries, and this machine's C library where
    that is new enough."""
    if not tree:
        return "criu"
    tree = os.path.abspath(tree)
    newer = os.path.join(os.path.dirname(tree), "criu-4.2")
    binary = next(p for p in (f"{newer}/usr/sbin/criu", f"{tree}/usr/sbin/criu") if os.path.exists(p))
    libraries = os.path.join(folder, "criu-libraries")
    os.mkdir(libraries)
    own = ("ld-linux", "libc.so", "libm.so", "libpthread", "libdl.so", "librt.so", "libresolv", "libnss", "libutil", "libmvec")
    folders = [f"{newer}/usr/lib/x86_64-linux-gnu", f"{tree}/usr/lib/x86_64-linux-gnu"]
    for source in folders:
        for name in os.listdir(source) if os.path.isdir(source) else []:
            if ".so" in name and not name.startswith(own) and not os.path.lexists(f"{libraries}/{name}"):
                os.symlink(os.path.realpath(f"{source}/{name}"), f"{libraries}/{name}")
    wrapper = os.path.join(folder, "criu")
    ways = (f"LD_LIBRARY_PATH={libraries} exec {binary}",
            f"exec {tree}/usr/lib64/ld-linux-x86-64.so.2 --library-path {':'.join(folders)} {binary}")
    for way in ways:
        with open(wrapper, "w") as file:
            file.write(f'#!/bin/sh\n{way} "$@"\n')
        os.chmod(wrapper, 0o755)
        if subprocess.run([wrapper, "--version"], capture_output=True).returncode == 0:
            break
    return wrapper


def criu_version(criu):
    done = subprocess.run([criu, "--version"], capture_output=True, text=True)
    found = re.search(r"Version: (\S+)", done.stdout)
    return found.group(1) if found else "unknown"


# What a daemon says when it has what `checkpoint.staging` says, or as much of it as there is.
HOST_MEMORY = "host memory for copies is ready"


class Daemon:
    """A daemon on a socket of its own, with spare workers ready."""

    def __init__(self, stage, driver, folder, spare=1, config=None):
        folder = tempfile.mkdtemp(dir=folder)
        self.socket = os.path.join(folder, "rekindled.sock")
        self.log_path = os.path.join(folder, "daemon.log")
        self.log = open(self.log_path, "w")
        self.command = [f"{stage}/bin/rekindled", "--socket", self.socket, "--cuda-driver", driver, "--spare", str(spare)]
        self.command += ["--config", config] if config else []
        self.start()

    def start(self):
        self.process = subprocess.Popen(self.command, stdout=self.log, stderr=self.log,
                                        env=dict(os.environ, REKINDLE_LOG=os.environ.get("REKINDLE_LOG", "info")))
        self.before = self.said().count("a worker is ready")  # of daemons before this one
        self.before_host = self.said().count(HOST_MEMORY)
        self.ready = 0

    def said(self):
        """All that it has logged until now."""
        return open(self.log_path).read()

    def restart(self):
        """Stops it as an administrator does, and starts it again on the same socket."""
        self.process.terminate()
        self.process.wait()
        self.start()

    def wait_workers(self, count):
        """Waits until so many workers have become ready since the daemon started, and its memory for copies."""
        deadline = time.monotonic() + 120 + 5 * count
        while time.monotonic() < deadline:
            said = self.said()
            ready = said.count("a worker is ready") - self.before
            if ready >= count and said.count(HOST_MEMORY) > self.before_host:
                self.ready = ready
                return
            if self.process.poll() is not None:
                raise SystemExit("bench: the daemon ended:\n" + open(self.log_path).read()[-600:])
            time.sleep(0.02)
        raise SystemExit("bench: workers do not come up; the daemon says:\n" + open(self.log_path).read()[-2000:])

    def wait_ready(self):
        """Waits until a worker has become ready since the last call."""
        self.wait_workers(self.ready + 1)

    def stop(self):
        self.process.terminate()
        self.process.wait()
        self.log.close()


def run(command, library, socket=None):
    env = dict(os.environ, LD_LIBRARY_PATH=library)
    if socket:
        env["REKINDLE_SOCKET"] = socket
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise SystemExit(f"bench: {' '.join(command)} failed ({done.returncode}): {done.stdout}{done.stderr}")
    return done.stdout
