"""The benchmark `migrate`: for how long a program stands still that moves to another host, and what is sent for it.

    migrate   `rekindle migrate`: memory is copied while the program runs, and what is left while it stands still
    lazy      the same with `--lazy`: the program runs before CRIU has read its own memory
    copy      what one does without it: `rekindle checkpoint --kill` into memory, a copy to the other host, `rekindle restore`

The other host is a pid namespace of this machine with a daemon of its own, so the figures are those of the machine, without a network:
what is sent goes through pipes. The program has as much memory of its own as GPU memory, and tells its progress in a file. `still` is
the time between its last step here and its first one there, `total` that from the command's start to that first step, in
milliseconds; `pause`, `dump`, `memory`, `send`, `restore` and `hand_over` are what the command reports of the first two and their parts. `sent` and
`needed` are MiB: of files, and what the program has of GPU memory. Ways take turns, and each move is a program of its own.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time

import sinks
from bench_common import Daemon, about, criu_of, criu_version, is_real, parser, spread, write_json
from checkpoint_runs import read

MIB = 1 << 20
WAYS = ("migrate", "lazy", "copy")
# MiB of memory that stays what it is, thousands of words that each step changes, and microseconds between steps: on the software GPU,
# and on a GPU.
SIZES = ((16, 1, 2000), (64, 1, 2000), (64, 64, 0))
SIZES_OF_GPU = ((256, 1000, 2000), (2048, 1000, 2000), (2048, 16000, 0))
# The first process of the other host's pid namespace: starts the daemon, and waits for orphans.
FIRST = """
import os, subprocess, sys, time
daemon = subprocess.Popen(sys.argv[1:])
while True:
    try:
        os.waitpid(-1, 0)
    except ChildProcessError:
        time.sleep(0.01)
"""


def say(text):
    print(f"bench: {text}", flush=True)


class Steps(threading.Thread):
    """When a program's progress has changed."""

    def __init__(self, path):
        super().__init__(daemon=True)
        self.path, self.seen, self.over = path, [], False
        self.start()

    def run(self):
        last = ""
        while not self.over:
            now = read(self.path).strip()
            if now and now != last:
                last = now
                self.seen.append((time.monotonic(), int(now)))
            time.sleep(0.0005)

    def wait_for(self, step, limit=120):
        deadline = time.monotonic() + limit
        while not self.seen or self.seen[-1][1] < step:
            if time.monotonic() > deadline:
                raise SystemExit(f"bench: the program does not come to step {step}")
            time.sleep(0.001)

    def longest(self):
        """The longest time between two steps: its end."""
        gaps = [(b[0] - a[0], b[0]) for a, b in zip(self.seen, self.seen[1:])]
        return max(gaps)


class Elsewhere:
    """The other host."""

    def __init__(self, o, folder, socket):
        self.folder = tempfile.mkdtemp(dir=folder)
        own = f"{self.folder}/rekindled.sock"
        self.log = open(f"{self.folder}/daemon.log", "w")
        command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL", sys.executable, "-c", FIRST,
                   f"{o.stage}/bin/rekindled", "--socket", own, "--cuda-driver", o.driver, "--spare", "1"]
        self.unshare = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        deadline = time.monotonic() + 120
        while "a worker is ready" not in read(f"{self.folder}/daemon.log"):
            if time.monotonic() > deadline:
                raise SystemExit("bench: the other daemon does not come up: " + read(f"{self.folder}/daemon.log")[-600:])
            time.sleep(0.01)
        children = read(f"/proc/{self.unshare.pid}/task/{self.unshare.pid}/children").split()
        self.enter = ["nsenter", f"--target={children[0]}", "--pid", "--mount", "env", f"REKINDLE_SOCKET={socket}"]
        # Programs look for a daemon where theirs was.
        subprocess.run(self.enter + ["mount", "--bind", own, socket], check=True)

    def stop(self):
        self.unshare.send_signal(signal.SIGKILL)
        self.unshare.wait()
        self.log.close()


def migrate(o, place, pid, *more):
    command = [f"{o.stage}/bin/rekindle", "migrate", str(pid), "there", "--via", " ".join(place["there"].enter), "--rekindle",
               f"{o.stage}/bin/rekindle", "--dir", f"{place['images']}/out", "--dir-there", f"{place['images']}/in",
               "--criu", place["criu"], "--json", *more]
    done = subprocess.run(command, env=place["env"], capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(f"bench: rekindle migrate: {done.stderr}")
    said = json.loads(done.stdout)
    own = sum(it["sent"] for it in said["memory"])
    return {"sent": (own + sum(it["sent"] for it in said["rounds"]) + said["last_sent"]) / MIB, "rounds": len(said["rounds"]),
            "own_sent": own / MIB, "last_sent": said["last_sent"] / MIB, "pause_ms": said["pause_ms"],
            **said["pause"]}


def lazily(o, place, pid):
    return migrate(o, place, pid, "--lazy")


def copy(o, place, pid):
    image, there = f"{place['images']}/image", f"{place['images']}/there"
    rekindle = f"{o.stage}/bin/rekindle"
    steps = ([rekindle, "checkpoint", str(pid), image, "--kill", "--criu", place["criu"]],
             ["cp", "-r", "--sparse=always", image, there],
             place["there"].enter + [rekindle, "restore", "-d", there, "--criu", place["criu"]])
    for step in steps:
        done = subprocess.run(step, env=place["env"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            raise SystemExit(f"bench: {' '.join(step)}: {done.stderr}")
    sent = sum(os.stat(f"{there}/{name}").st_blocks * 512 for name in os.listdir(there))
    subprocess.run(["rm", "-rf", image, there], check=True)
    return {"sent": sent / MIB}


def move(o, place, way, size):
    """One program that moves once."""
    mib, words, sleep = size
    folder = tempfile.mkdtemp(dir=place["folder"])
    end, progress, out = f"{folder}/end", f"{folder}/progress", open(f"{folder}/out", "a")
    command = [f"{o.stage}/share/rekindle/apps/steady", "--until", end, "--ballast-kib", str(mib * 1024), "--words", str(words * 1000),
               "--sleep-us", str(sleep), "--progress", progress]
    env = dict(place["env"], LD_LIBRARY_PATH=f"{o.stage}/lib/rekindle")
    program = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd="/")
    steps = Steps(progress)
    steps.wait_for(20)
    began = time.monotonic()
    result = {"migrate": migrate, "lazy": lazily, "copy": copy}[way](o, place, program.pid)
    program.wait()
    steps.wait_for(steps.seen[-1][1] + 20)
    steps.over = True
    still, at = steps.longest()
    open(end, "w").close()
    deadline = time.monotonic() + 60
    while "steady ok" not in read(f"{folder}/out"):
        if time.monotonic() > deadline:
            raise SystemExit("bench: the program that has moved does not end as it should: " + read(f"{folder}/out"))
        time.sleep(0.01)
    out.close()
    return dict(result, still_ms=still * 1e3, total_ms=(at - began) * 1e3, needed=mib)


def main():
    o = parser("tree", "images", "only", "ways").parse_args()
    ways = o.ways.split(",") if o.ways else WAYS
    sinks.have_run_in_memory()
    with tempfile.TemporaryDirectory(prefix="rekindle-bench-") as folder, sinks.images(o.images, folder) as images:
        os.chmod(folder, 0o711)
        criu = criu_of(o.tree, folder)
        here = Daemon(o.stage, o.driver, folder)
        here.wait_workers(1)
        os.chmod(os.path.dirname(here.socket), 0o711)
        place = {"folder": folder, "images": images, "criu": criu, "env": dict(os.environ, REKINDLE_SOCKET=here.socket)}
        if o.tree:
            # The other host finds it in its PATH.
            place["env"]["PATH"] = os.path.dirname(criu) + ":" + os.environ["PATH"]
        place["there"] = Elsewhere(o, folder, here.socket)
        document = dict(about(o, "migrate"), criu=criu_version(criu), images=sinks.describe(images), results=[])
        for size in SIZES_OF_GPU if is_real(o.driver) else SIZES:
            if o.only and not re.search(o.only, f"{size[0]} MiB {size[1]}000 words"):
                continue
            runs = {way: [] for way in ways}
            for _ in range(o.rounds):
                for way in ways:
                    runs[way].append(move(o, place, way, size))
            for way in ways:
                row = {key: spread([it[key] for it in runs[way]]) for key in runs[way][0]}
                document["results"].append({"way": way, "mib": size[0], "words": size[1] * 1000, "sleep_us": size[2], **row})
                said = ", ".join(f"{key} {value['median']:.1f}" for key, value in row.items())
                say(f"{size[0]} MiB, {size[1]}000 words a step: {way}: {said}")
        place["there"].stop()
        here.stop()
        write_json(o.out, document)


main()
