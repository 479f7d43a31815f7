"""The benchmark `checkpoint`: what `criu dump --leave-running` costs a program that goes on, by each protocol, beside what the
driver's own checkpoints cost it.

For each workload and size one process is checkpointed again and again at random moments, by turns with each protocol, its
image in memory. Its steps say how long it stood still; CRIU, the image and a look at the process every millisecond say
what of that was whose. Reported are medians with the lowest and highest. With a budget, what matters first is measured
first, and what there was no time for is said.

    train    steps of an optimizer over all memory, then computing (tests/apps/steps.cu)
    decode   steps that read all memory and write a hundredth of it
    idle     no steps
    llama13b, gpt   PyTorch: decoding with a model of Llama 13B's shape, training of 1.3 billion parameters with AdamW
"""

import argparse
import datetime
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from bench_common import Daemon, criu_of, driver_version, native_folder, run, spread
from checkpoint_runs import Driver, Failed, Place, Work, criu_version, dump, forget, touch, write_rate

HERE = os.path.dirname(os.path.abspath(__file__))
GIB = 1 << 30
PROTOCOLS = ("clone", "cow", "stop", "recopy")
TORCH = {"llama13b": 26, "gpt": 24}  # GiB on the GPU, about
STEPS = {"train": (100, 30000), "decode": (1, 0), "idle": (0, 0)}  # percent written in a step, microseconds of computing
INCREMENTAL = "incremental"  # by clone, on an image by clone
DRIVER = "driver"


def say(text):
    print(f"bench: {text}", flush=True)


class Budget:
    """How much time is left, and what it did not suffice for."""

    def __init__(self, seconds):
        self.end = time.monotonic() + seconds if seconds else None
        self.left_out = []

    def left(self):
        return self.end - time.monotonic() if self.end else 1e9

    def allows(self, seconds, what):
        if self.left() >= seconds:
            return True
        self.left_out.append(what)
        return False


class Memory:
    """Host memory that has been there: on some machines it is slow the first time."""

    touched = 0

    def touch(self, size):
        size = int(min(size, available() * 0.85))
        if size > self.touched:
            touch(size, min(16, os.cpu_count()))
            self.touched = size


def available():
    """Bytes of memory that there is room for."""
    with open("/proc/meminfo") as file:
        return int(re.search(r"MemAvailable:\s+(\d+)", file.read()).group(1)) * 1024


def free(folder):
    """Bytes that files there may take, and memory has room for."""
    return min(shutil.disk_usage(folder).free, available())


def machine_rates(o, place):
    """What device, link and memory do by themselves, in GB/s; without what cannot be measured."""
    rates = {}

    def ask(command):
        try:
            return json.loads(run(command, native_folder(o.stage, o.driver)))
        except (SystemExit, ValueError) as error:  # one rate less, not the whole benchmark
            say(str(error))
            return {}
    command = [f"{o.stage}/bin/rekindled", "bench-hash", "--cuda-driver", o.driver]
    command += ["--kib", "4194304", "--repeats", "11"] if place.real else ["--kib", "64", "--repeats", "2", "--piece-kib", "64"]
    for figures in ask(command).get("figures", []):
        rates.update({f"device_{kind}": spread(figures[kind][1:]) for kind in ("copy", "hash", "copy_and_hash")})
    link = ask([sys.executable, f"{HERE}/driver_calls.py", o.driver, "rates", "1024" if place.real else "4"])
    rates.update({f"link_{way}": spread(values) for way, values in link.items()})
    size = min(4 * GIB if place.real else 1 << 26, free(place.images) * 8 // 10)
    sinks = [threads for threads in (1, 4, 8, 16) if threads <= os.cpu_count()]
    rates.update({f"sink_{threads}_threads": spread([write_rate(place.images, size, threads) for _ in range(2)]) for threads in sinks})
    rates["sink"] = max((rates[f"sink_{threads}_threads"] for threads in sinks), key=lambda it: it["median"])
    return rates


class Item:
    """One workload of one size."""

    def __init__(self, kind, gib, rounds, driver_rounds, protocols):
        self.kind, self.gib, self.rounds, self.driver_rounds, self.protocols = kind, gib, rounds, driver_rounds, protocols
        self.name = kind if kind in TORCH else f"{kind} {gib:g} GiB"
        self.size = int(gib * GIB)
        self.idle = kind == "idle"
        self.samples, self.failures = {}, {}
        self.notes = []

    def command(self, o, real):
        if self.kind in TORCH:
            return [sys.executable, f"{HERE}/checkpoint_work.py", self.kind, "TIMES"]
        touch, compute = STEPS[self.kind]
        words = {"--mib": max(1, self.size >> 20), "--piece-mib": 256 if real else 1, "--touch": touch,
                 "--compute-us": compute if real else 0, "--steps": 0, "--times": "TIMES"}
        return [f"{o.stage}/share/rekindle/apps/steps", *(str(word) for pair in words.items() for word in pair)]

    def guess(self, protocol):
        """Seconds that one checkpoint takes."""
        known = [it["wall_s"] for it in self.samples.get(protocol, [])]
        if known:
            return max(known) * 1.1
        return 4 + self.gib * (1.3 if protocol == DRIVER else 0.35)

    def start_guess(self):
        return 60 if self.kind in TORCH else 4 + self.gib * 0.1

    def note(self, text):
        if text not in self.notes:
            self.notes.append(text)
            say(f"{self.name}: {text}")

    def keep(self, protocol, sample, began):
        sample["wall_s"] = time.monotonic() - began
        self.samples.setdefault(protocol, []).append(sample)
        if "criu_failed" in sample:
            self.note(f"{protocol}: {sample['criu_failed']}")
        gap = f"gap {sample['gap_ms']:.1f} ms, " if "gap_ms" in sample else ""
        say(f"{self.name}, {protocol}: {gap}durable {sample.get('durable_ms', 0):.0f} ms ({sample['wall_s']:.1f} s)")


class Bench:
    def __init__(self, o, place, budget, memory):
        self.o, self.place, self.budget, self.memory = o, place, budget, memory

    def start(self, item, native):
        try:
            return Work(self.place, item.command(self.o, self.place.real), native, min(180, self.budget.left()))
        except (Failed, OSError) as error:
            item.note(f"does not start{' natively' if native else ''}: {error}")
            return None

    def item(self, item):
        """All of one item; nothing of it is left running."""
        if not self.budget.allows(item.start_guess() + 2 * item.guess("clone"), item.name):
            return
        self.memory.touch(item.size * 9 // 8 * (2 if item.driver_rounds else 1) if self.place.real else 0)
        if item.protocols:
            self.under_rekindle(item)
        if item.driver_rounds and self.budget.allows(item.start_guess() + item.guess(DRIVER), f"{item.name}, {DRIVER}"):
            self.by_the_driver(item)

    def under_rekindle(self, item):
        work, starts = self.start(item, False), 1
        try:
            for turn in range(item.rounds):
                for protocol in [it for it in item.protocols if item.failures.get(it, 0) < 2]:
                    if work and not work.alive():
                        work, starts = self.start(item, False) if starts < 3 else None, starts + 1
                    if not work:
                        return
                    if self.budget.allows(item.guess(protocol), f"{item.name}, {protocol}, {turn + 1} of {item.rounds}"):
                        self.one(item, work, protocol)
        finally:
            if work:
                work.stop()

    def one(self, item, work, protocol):
        """One checkpoint by a protocol; of `clone`, another one that builds on it."""
        image = self.place.image()
        try:
            began = time.monotonic()
            sample = dump(work, image, protocol, item.idle, min(180, self.budget.left() + 20))
            item.keep(protocol, sample, began)
            if sample["protocol"] != protocol:
                item.note(f"{protocol} came to {sample['protocol']}: {sample['reason']}")
            if protocol == "clone" and INCREMENTAL not in self.o.skip:
                self.incremental(item, work, image)
        except (Failed, OSError, ValueError, RuntimeError) as error:
            item.failures[protocol] = item.failures.get(protocol, 0) + 1
            item.note(f"{protocol}: {error}")
            if not item.idle and work.stuck():
                work.stop()
        finally:
            forget(image)

    def incremental(self, item, work, parent):
        if free(self.place.images) < item.size * 5 // 4 or not self.budget.allows(item.guess(INCREMENTAL), f"{item.name}, {INCREMENTAL}"):
            return item.note("no memory or time for an incremental image beside its parent")
        image = self.place.image()
        try:
            began = time.monotonic()
            sample = dump(work, image, "clone", item.idle, min(180, self.budget.left() + 20), parent)
            if sample["parent"]:
                item.keep(INCREMENTAL, sample, began)
            else:
                self.o.skip.add(INCREMENTAL)
                item.note("an image does not build on another: no incremental ones")
        except Failed as error:
            item.note(f"{INCREMENTAL}: {error}")
        finally:
            forget(image)

    def by_the_driver(self, item):
        if not self.place.real:
            return item.note("the software GPU has no checkpoints of its own")
        work = self.start(item, True)
        if not work:
            return
        driver = None
        try:
            driver = Driver(self.place)
            for turn in range(item.driver_rounds):
                if not self.budget.allows(item.guess(DRIVER), f"{item.name}, {DRIVER}, {turn + 1} of {item.driver_rounds}"):
                    return
                image, began = self.place.image(), time.monotonic()
                try:
                    item.keep(DRIVER, driver.checkpoint(work, image, item.idle, min(180, self.budget.left() + 20)), began)
                finally:
                    forget(image)
        except (Failed, OSError) as error:
            item.note(f"{DRIVER}: {error}")
        finally:
            if driver:
                driver.stop()
            work.stop()


def plan(o, real):
    """What is measured, the first first."""
    sizes = [float(it) for it in o.sizes.split(",")] if o.sizes else [1, 4, 16, 40] if real else [1 / 256, 1 / 128]
    protocols = [it for it in PROTOCOLS if it in o.protocols.split(",")]
    by_rank = sorted(sizes, key=lambda it: (it not in (16, 40), it if it in (16, 40) else -it))

    def item(kind, gib, driver=False):
        rounds = o.rounds if gib <= 16 else max(1, o.rounds - 1)
        times = (2 if gib <= 16 else 1) if driver and gib <= o.driver_most and DRIVER in o.protocols else 0
        return Item(kind, gib, rounds, times, protocols)
    torch = [item(kind, gib, True) for kind, gib in TORCH.items()] if real and importlib.util.find_spec("torch") else []
    most = {it: [item("train", it, True), item("decode", it)] for it in by_rank}
    items = most.get(16, []) + most.get(40, [])[:1]
    items += [it for it in torch if it.kind == "llama13b"]
    items += most.get(40, [])[1:]
    items += [it for gib in by_rank if gib not in (16, 40) for it in most[gib]]
    items += [it for it in torch if it.kind == "gpt"]
    items += [item("idle", gib) for gib in by_rank]
    return [it for it in items if not o.only or re.search(o.only, it.name)]


# Columns of the table: a head, what of a sample it is, by what it is divided, and how many digits it has.
COLUMNS = (
    ("gap", "gap_ms", 1, 1), ("gaps", "gaps_ms", 1, 1), ("freeze", "freeze_ms", 1, 1), ("stall", "stall_ms", 1, 1),
    ("precopy", "pre_copy_ms", 1, 0), ("quiesce", "quiesce_ms", 1, 1), ("hash", "hash_ms", 1, 1), ("clone", "clone_ms", 1, 1),
    ("copy", "copy_ms", 1, 0), ("write", "write_ms", 1, 0), ("resume", "resume_ms", 1, 1), ("durable", "durable_ms", 1, 0),
    ("GB/s", "copy_gb_s", 1, 1), ("GPU GB", "gpu_bytes", 1e9, 2), ("CPU MB", "cpu_bytes", 1e6, 1), ("pages", "pages_bytes", 1e6, 1),
    ("speed", "throughput", 0.01, 0),
)
DRIVER_COLUMNS = (
    ("gap", "gap_ms", 1, 0), ("lock", "driver_lock_ms", 1, 0), ("checkpoint", "driver_checkpoint_ms", 1, 0), ("criu", "driver_criu_ms", 1, 0),
    ("restore", "driver_restore_ms", 1, 0), ("unlock", "driver_unlock_ms", 1, 0), ("CPU GB", "cpu_bytes", 1e9, 2),
)


def numbers(samples):
    """The spread of all that is a number in samples."""
    names = {name for it in samples for name, value in it.items() if isinstance(value, (int, float)) and not isinstance(value, bool)}
    return {name: spread([it[name] for it in samples if name in it]) for name in sorted(names)}


def table(title, rows, columns):
    """Medians, and below them the lowest and highest."""
    print(title)
    width = max([len(name) for name, _ in rows] + [10]) + 2
    cells = []
    for name, figures in rows:
        line, range_of = [], []
        for _, key, by, digits in columns:
            it = figures.get(key)
            line.append(f"{it['median'] / by:.{digits}f}" if it else "-")
            range_of.append(f"{it['low'] / by:.{digits}f}..{it['high'] / by:.{digits}f}" if it and it["low"] != it["high"] else "")
        cells += [(name, line), ("", range_of)]
    widths = [max([len(head), *(len(line[i]) for _, line in cells)]) for i, (head, *_) in enumerate(columns)]
    print(" " * width + "  ".join(head.rjust(w) for (head, *_), w in zip(columns, widths)))
    for name, line in cells:
        if any(line):
            print(name.ljust(width) + "  ".join(cell.rjust(w) for cell, w in zip(line, widths)))


def aims(item, protocol, figures, rates):
    """What was measured beside what it is to be."""
    found = []

    def median(name):
        return figures.get(name, {}).get("median")

    def aim(what, value, at_most=None, at_least=None):
        reached = value <= at_most if at_least is None else value >= at_least
        found.append({"what": what, "value": value, "at_most": at_most, "at_least": at_least, "reached": reached})
    rate = {"clone": "device_copy", "cow": "device_hash"}.get(protocol)
    handled = median({"clone": "clone_bytes", "cow": "hash_bytes"}.get(protocol)) or median("copy_bytes")
    if rate in rates and handled and median("stall_ms") is not None:
        # What is hashed or copied while CRIU's freeze lasts costs nothing.
        most = 3 + handled / (0.85 * rates[rate]["median"]) / 1e6
        aim(f"ms that the GPU's side costs (3 ms and {handled / 1e9:.1f} GB at 85 % of the device's rate)", median("stall_ms"), most)
    if item.kind == "llama13b" and protocol in ("clone", "cow") and "gaps_ms" in figures and "freeze_ms" in figures:
        aim("ms of gaps (CRIU's freeze and 20 ms)", median("gaps_ms"), median("freeze_ms") + 20)
        aim("ms of gaps", median("gaps_ms"), 700)
    if median("copy_gb_s") and "link_to_host" in rates:
        aim("of the link's rate while copying", median("copy_gb_s") / rates["link_to_host"]["median"], at_least=0.95)
    if median("image_gb_s") and "link_to_host" in rates:
        slower = min(rates["link_to_host"]["median"], rates["sink"]["median"])
        aim("of the slower rate of link and sink, until the image is durable", median("image_gb_s") / slower, at_least=0.9)
    if protocol == "clone" and median("throughput"):
        aim("of the undisturbed speed while it is copied", median("throughput"), at_least=0.97)
    if protocol == INCREMENTAL and item.kind in ("idle", "llama13b"):
        first = numbers(item.samples["clone"])["gpu_bytes"]["median"]
        aim("of the first image's bytes of the GPU", median("gpu_bytes") / first, 0.01)
    return found


def report(o, place, rates, items, budget, took):
    """Writes the JSON, and returns it."""
    workloads = []
    for item in items:
        figures = {protocol: numbers(samples) for protocol, samples in item.samples.items()}
        ratios = {protocol: aims(item, protocol, it, rates) for protocol, it in figures.items() if place.real and protocol != DRIVER}
        if item.samples or item.notes:
            workloads.append({"name": item.name, "gib": item.gib, "notes": item.notes, "figures": figures, "aims": ratios,
                              "samples": item.samples})
    config = None
    if o.config:
        with open(o.config) as file:
            config = file.read()
    document = {
        "benchmark": "checkpoint", "date": datetime.date.today().isoformat(), "commit": o.commit, "version": o.version,
        "device": device_name(place.real), "driver": driver_version(place.real), "kernel": platform.release(),
        "cores": os.cpu_count(), "criu": criu_version(place.criu), "config": config, "seconds": took, "rates": rates,
        "left_out": budget.left_out, "workloads": workloads,
    }
    with open(o.out + ".new", "w") as file:
        json.dump(document, file, indent=1)
    os.rename(o.out + ".new", o.out)
    return document


def show(document):
    print(f"\n{document['device']}, {document['driver']}, Linux {document['kernel']}, CRIU {document['criu']}, {document['commit']}")
    print("GB/s: " + ", ".join(f"{name.replace('_', ' ')} {it['median']:.1f}" for name, it in document["rates"].items()))
    for it in document["workloads"]:
        figures = it["figures"]
        step = next((of["step_ms"]["median"] for of in figures.values() if "step_ms" in of), None)
        title = f"\n{it['name']}" + (f", {step:.2f} ms a step" if step else "") + ": milliseconds, GB, GB/s, percent; median, lowest..highest"
        rows = [(f"{protocol} x{len(it['samples'][protocol])}", of) for protocol, of in figures.items() if protocol != DRIVER]
        if rows:
            table(title, rows, COLUMNS)
        if DRIVER in figures:
            table("" if rows else title, [(f"{DRIVER} x{len(it['samples'][DRIVER])}", figures[DRIVER])], DRIVER_COLUMNS)
        for protocol, of in it["aims"].items():
            for one in of:
                limit = f"at most {one['at_most']:.3g}" if one["at_least"] is None else f"at least {one['at_least']:.3g}"
                print(f"  {protocol}: {one['value']:.3g} {one['what']}: {limit}, {'reached' if one['reached'] else 'not reached'}")
        for note in it["notes"]:
            print(f"  {note}")
    if document["left_out"]:
        print("no time for: " + "; ".join(document["left_out"]))


def device_name(real):
    if not real:
        return "software GPU"
    done = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    return done.stdout.split("\n")[0]


def options():
    parser = argparse.ArgumentParser()
    for option in ("stage", "driver", "out", "commit", "version"):
        parser.add_argument(f"--{option}", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    for option in ("tree", "config", "sizes", "only"):
        parser.add_argument(f"--{option}")
    parser.add_argument("--protocols", default=",".join([*PROTOCOLS, INCREMENTAL, DRIVER]))
    parser.add_argument("--budget", type=float, default=0)
    parser.add_argument("--driver-most", type=float, default=40)
    parser.add_argument("--images", default="/dev/shm")
    o = parser.parse_args()
    o.skip = {it for it in (INCREMENTAL,) if it not in o.protocols.split(",")}
    return o


def main():
    o = options()
    begin, budget = time.monotonic(), Budget(o.budget)
    items, rates = plan(o, "simgpu" not in o.driver), {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what has been measured is reported all the same
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir=o.images) as images:
        daemon = Daemon(o.stage, o.driver, folder, config=o.config)
        place = Place(o.stage, o.driver, criu_of(o.tree, folder), daemon.socket, folder, images)
        try:
            daemon.wait_ready()
            memory = Memory()
            memory.touch(min(16, max([it.gib for it in items], default=0)) * GIB * 9 // 8 if place.real else 0)
            rates = machine_rates(o, place)
            say(f"rates measured after {time.monotonic() - begin:.0f} s")
            bench = Bench(o, place, budget, memory)
            for item in items:
                bench.item(item)
                report(o, place, rates, items, budget, time.monotonic() - begin)
        finally:
            daemon.stop()
            shutil.copy(daemon.log_path, os.path.splitext(o.out)[0] + "-daemon.log")
            show(report(o, place, rates, items, budget, time.monotonic() - begin))
            print(f"bench: {o.out}, {time.monotonic() - begin:.0f} s")
    return 0 if any(it.samples for it in items) else 1


if __name__ == "__main__":
    sys.exit(main())
