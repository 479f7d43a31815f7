"""The benchmark `checkpoint`: what `criu dump --leave-running` costs a program that goes on, by each protocol, beside what the
driver's own checkpoints cost it.

For each workload and size (checkpoint_items.py) one process is checkpointed again and again at random moments, by turns with
each protocol. Its steps say how long it stood still; CRIU, the image and a look at the process every millisecond say
what of that was whose. Reported are medians with the lowest and highest. With a budget, what matters first is measured
first, and what there was no time for is said.
"""

import os
import re
import shutil
import signal
import sys
import tempfile
import time

import checkpoint_rates
import sinks
from bench_common import Daemon, criu_of, is_real, parser
from checkpoint_items import DRIVER, INCREMENTAL, PROTOCOLS, plan
from checkpoint_report import report, show
from checkpoint_runs import Driver, Failed, Place, Work, dump, forget

HERE = os.path.dirname(os.path.abspath(__file__))


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

    def limit(self):
        """Seconds that one more thing may take."""
        return min(180, self.left() + 20)


def touch_memory(items, budget):
    """Has the host memory be there that the largest needs, once for all, with an eighth of the time at most."""
    most = max((it.needs() for it in items), default=0)
    size = int(min(most, sinks.available() * 0.85))
    if size:
        touched, rate = sinks.touch(size, min(16, os.cpu_count()), min(120, budget.left() / 8))
        say(f"{touched / 1e9:.1f} of {size / 1e9:.1f} GB of host memory touched at {rate:.1f} GB/s")


class Daemons:
    """One daemon at a time, of the configuration that an item wants."""

    def __init__(self, o, place):
        self.o, self.place, self.setting, self.daemon = o, place, None, None
        self.logs = []

    def want(self, setting):
        """One with this line in `[checkpoint]` besides, if it is one."""
        if self.daemon and self.setting == setting:
            return
        self.stop()
        self.setting = setting
        self.daemon = Daemon(self.o.stage, self.o.driver, self.place.folder, config=self.config(setting))
        self.place.socket = self.daemon.socket
        self.daemon.wait_ready()

    def config(self, setting):
        if setting is None:
            return self.o.config
        text, head = "", "[checkpoint]\n"
        if self.o.config:
            with open(self.o.config) as file:
                text = file.read()
        key = setting.split("=")[0].strip()
        text = re.sub(rf"^{key}\s*=.*\n?", "", text, flags=re.MULTILINE)
        text = text.replace(head, f"{head}{setting}\n") if head in text else f"{text}\n{head}{setting}\n"
        path = os.path.join(tempfile.mkdtemp(dir=self.place.folder), "rekindled.toml")
        with open(path, "w") as file:
            file.write(text)
        return path

    def stop(self):
        if self.daemon:
            self.daemon.stop()
            self.logs.append(self.daemon.log_path)
            self.daemon = None

    def keep_logs(self, path):
        with open(path, "wb") as out:
            for log in self.logs:
                with open(log, "rb") as file:
                    shutil.copyfileobj(file, out)


class Bench:
    def __init__(self, o, place, budget, daemons, sink):
        self.o, self.place, self.budget, self.daemons = o, place, budget, daemons
        self.sink = sink  # GB/s
        self.incremental_works = INCREMENTAL in o.protocols.split(",")

    def start(self, item, native):
        command = item.command(self.o.stage, HERE, sys.executable, self.place.real)
        try:
            work = Work(self.place, command, native, min(180, self.budget.left()))
            item.memory["natively" if native else "under Rekindle"] = work.memory()
            return work
        except (Failed, OSError) as error:
            self.note(item, f"does not start{' natively' if native else ''}: {error}")
            return None

    def note(self, item, text):
        if text not in item.notes:
            item.notes.append(text)
            say(f"{item.name}: {text}")

    def keep(self, item, protocol, sample, began):
        sample["wall_s"] = time.monotonic() - began
        item.samples.setdefault(protocol, []).append(sample)
        if "criu_failed" in sample:
            self.note(item, f"{protocol}: {sample['criu_failed']}")
        gap = f"gap {sample['gap_ms']:.1f} ms, " if "gap_ms" in sample else ""
        say(f"{item.name}, {protocol}: {gap}durable {sample.get('durable_ms', 0):.0f} ms ({sample['wall_s']:.1f} s)")

    def guess(self, item, protocol):
        return item.guess(protocol, self.sink)

    def item(self, item):
        """All of one item; nothing of it is left running."""
        if not self.budget.allows(item.start_guess() + 2 * self.guess(item, "clone"), item.name):
            return
        if item.protocols:
            self.under_rekindle(item)
        if item.driver_rounds and self.budget.allows(item.start_guess() + self.guess(item, DRIVER), f"{item.name}, {DRIVER}"):
            self.by_the_driver(item)

    def under_rekindle(self, item):
        try:
            self.daemons.want(item.setting())
        except SystemExit as error:
            return self.note(item, f"no daemon with this configuration: {error}")
        work, starts = self.start(item, False), 1
        try:
            for turn in range(item.rounds):
                for protocol in item.wanted():
                    if work and not work.alive():
                        work, starts = self.start(item, False) if starts < 3 else None, starts + 1
                    if not work:
                        return
                    if self.budget.allows(self.guess(item, protocol), f"{item.name}, {protocol}, {turn + 1} of {item.rounds}"):
                        self.one(item, work, protocol)
        finally:
            if work:
                work.stop()

    def one(self, item, work, protocol):
        """One checkpoint by a protocol; of `clone`, another one that builds on it."""
        image = self.place.image()
        try:
            began = time.monotonic()
            sample = dump(work, image, item.how(protocol), self.budget.limit())
            self.keep(item, protocol, sample, began)
            if sample["protocol"] != protocol:
                self.note(item, f"{protocol} came to {sample['protocol']}: {sample['reason']}")
            if protocol == "clone" and self.incremental_works and not item.switch:
                self.incremental(item, work, image)
        except (Failed, OSError, ValueError, RuntimeError) as error:
            item.failures[protocol] = item.failures.get(protocol, 0) + 1
            self.note(item, f"{protocol}: {error}")
            if not item.idle and work.stuck():
                work.stop()
        finally:
            forget(image)

    def incremental(self, item, work, parent):
        """What changes decides what it needs; of what writes everything that is as much again."""
        room = item.size * 5 // 4 if item.kind in ("train", "moments", "gpt", "gptsmall") else item.size // 4
        if sinks.free(self.place.images) < room or not self.budget.allows(self.guess(item, INCREMENTAL), f"{item.name}, {INCREMENTAL}"):
            return self.note(item, "no memory or time for an incremental image beside its parent")
        image = self.place.image()
        try:
            began = time.monotonic()
            sample = dump(work, image, item.how("clone"), self.budget.limit(), parent)
            if sample["parent"]:
                self.keep(item, INCREMENTAL, sample, began)
            else:
                self.incremental_works = False
                self.note(item, "an image does not build on another: no incremental ones")
        except Failed as error:
            self.note(item, f"{INCREMENTAL}: {error}")
        finally:
            forget(image)

    def by_the_driver(self, item):
        if not self.place.real:
            return self.note(item, "the software GPU has no checkpoints of its own")
        work = self.start(item, True)
        if not work:
            return
        driver = None
        try:
            driver = Driver(self.place)
            for turn in range(item.driver_rounds):
                if not self.budget.allows(self.guess(item, DRIVER), f"{item.name}, {DRIVER}, {turn + 1} of {item.driver_rounds}"):
                    return
                image, began = self.place.image(), time.monotonic()
                try:
                    self.keep(item, DRIVER, driver.checkpoint(work, image, item.idle, self.budget.limit()), began)
                finally:
                    forget(image)
        except (Failed, OSError) as error:
            self.note(item, f"{DRIVER}: {error}")
        finally:
            if driver:
                driver.stop()
            work.stop()


def options():
    more = parser("tree", "config", "sizes", "only", "images")
    more.add_argument("--protocols", default=",".join([*PROTOCOLS, INCREMENTAL, DRIVER]))
    more.add_argument("--budget", type=float, default=0)
    more.add_argument("--driver-most", type=float, default=40)
    return more.parse_args()


def measure(o, place, items, budget):
    """Everything, and a report after each item."""
    begin, rates, daemons = time.monotonic(), {}, Daemons(o, place)

    def tell():
        return report(o, place, rates, items, budget.left_out, time.monotonic() - begin)
    try:
        daemons.want(None)
        if place.real:
            touch_memory(items, budget)
        rates = checkpoint_rates.measure(o, place, say)
        say(f"rates measured after {time.monotonic() - begin:.0f} s")
        sink = min(rates[it]["median"] for it in ("sink", "link_to_host") if it in rates)
        bench = Bench(o, place, budget, daemons, sink)
        for item in items:
            bench.item(item)
            tell()
    finally:
        daemons.stop()
        daemons.keep_logs(os.path.splitext(o.out)[0] + "-daemon.log")
        show(tell())
        print(f"bench: {o.out}, {time.monotonic() - begin:.0f} s")


def main():
    o = options()
    budget, items = Budget(o.budget), plan(o, is_real(o.driver))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # what has been measured is reported all the same
    with tempfile.TemporaryDirectory() as folder, sinks.images(o.images, folder) as images:
        measure(o, Place(o.stage, o.driver, criu_of(o.tree, folder), folder, images), items, budget)
    return 0 if any(it.samples for it in items) else 1


if __name__ == "__main__":
    sys.exit(main())
