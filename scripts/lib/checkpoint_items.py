"""What the benchmark `checkpoint` measures: workloads of sizes, and in which order.

    train      steps of an optimizer over all memory, then computing (tests/apps/steps.cu)
    moments    the same, checkpointed where a step begins (`rekindle_checkpoint`)
    decode     steps that read all memory and write a hundredth of it
    decode13b  the same with as much memory as a model of 13 billion parameters
    batches    as decode, with computing, and pinned copies of 256 MiB to the device and back in each step
    staged     as train, with room in the daemon's host memory for all of it
    idle       no steps
    pinned     as idle, with 64 MiB on the device and its size in pinned memory of the host
    llama13b, gpt   PyTorch: decoding with a model of Llama 13B's shape, training of 1.3 billion parameters with AdamW
    gptsmall   the same of 0.1 billion
    experts    PyTorch: decoding with a mixture of experts, of which a token uses an eighth
"""

import dataclasses
import importlib.util
import re

GIB = 1 << 30
PROTOCOLS = ("clone", "cow", "stop", "recopy")
INCREMENTAL = "incremental"  # by clone, on an image by clone
DRIVER = "driver"
# What of the configuration is changed for some.
ALWAYS_FIRST, NEVER_FIRST, IN_HOST_MEMORY = "always first", "never first", "in host memory"
TORCH = {"llama13b": 26, "gpt": 24, "gptsmall": 2, "experts": 25}  # GiB on the GPU, about
DECODE_13B = 24.25  # GiB: 26 GB of weights
# What the program is told: percent written in a step, microseconds of computing, and more.
STEPS = {
    "train": {"--touch": 100, "--compute-us": 30000}, "moments": {"--touch": 100, "--compute-us": 30000, "--moments": 1},
    "decode": {"--touch": 1}, "decode13b": {"--touch": 1}, "batches": {"--touch": 1, "--compute-us": 30000, "--copy-mib": 256},
    "staged": {"--touch": 100, "--compute-us": 30000}, "idle": {"--touch": 0}, "pinned": {"--touch": 0},
}
# Which protocols, and changes of the configuration, of workloads that are not for all.
ONLY = {"pinned": ("clone",), "batches": ("clone",), "staged": ("stop", "cow")}
SWITCHES = {"batches": (ALWAYS_FIRST, NEVER_FIRST), "staged": (IN_HOST_MEMORY,)}
# The order on a real GPU, with how often each protocol is measured, and the driver's own way.
ORDER = (
    ("decode13b", DECODE_13B, 2, 1), ("train", 40, 1, 1), ("pinned", 1, 2, 0), ("pinned", 8, 2, 0), ("gptsmall", 2, 1, 1),
    ("batches", 16, 2, 0), ("staged", 16, 2, 0), ("idle", 16, 1, 0), ("train", 1, 2, 1), ("decode", 1, 2, 0), ("train", 4, 2, 0),
    ("decode", 4, 2, 0), ("train", 100, 1, 0), ("llama13b", 26, 1, 0), ("decode", 100, 1, 0), ("moments", 16, 2, 0),
    ("idle", 40, 1, 0), ("train", 16, 2, 1), ("decode", 16, 2, 1), ("decode", 40, 1, 1), ("idle", 1, 1, 1), ("idle", 4, 1, 0),
    ("idle", 100, 1, 0), ("gpt", 24, 1, 1),
)


@dataclasses.dataclass(frozen=True)
class How:
    """How a program is checkpointed."""

    protocol: str
    idle: bool = False
    moments: bool = False


class Item:
    """One workload of one size, and what was measured of it."""

    def __init__(self, kind, gib, rounds, driver_rounds, protocols, switch=None):
        self.kind, self.gib, self.rounds, self.driver_rounds = kind, gib, rounds, driver_rounds
        self.protocols = protocols
        self.switch = switch  # what of the configuration is changed
        size = f"{gib:g} GiB" if gib >= 1 else f"{gib * 1024:g} MiB"
        self.name = " ".join(filter(None, [kind, None if self.of_known_size() else size, switch and f"({switch})"]))
        self.size = int((gib if kind != "pinned" else 1 / 16) * GIB)
        self.host = int(gib * GIB) if kind == "pinned" else 0
        self.idle = kind in ("idle", "pinned")
        self.samples, self.failures, self.memory = {}, {}, {}
        self.notes = []

    def of_known_size(self):
        return self.kind in TORCH or self.kind == "decode13b"

    def how(self, protocol):
        return How(protocol, self.idle, self.kind == "moments")

    def command(self, stage, here, python, real):
        """What runs, with TIMES for the file of its steps."""
        if self.kind in TORCH:
            return [python, f"{here}/checkpoint_work.py", self.kind, "TIMES"]
        words = {"--mib": max(1, self.size >> 20), "--piece-mib": 256 if real else 1, "--steps": 0, "--times": "TIMES", **STEPS[self.kind]}
        if self.host:
            words["--pinned-mib"] = max(1, self.host >> 20)
        if not real:
            words.update({"--compute-us": 0, **({"--copy-mib": 1} if "--copy-mib" in words else {})})
        return [f"{stage}/share/rekindle/apps/steps", *(str(word) for pair in words.items() for word in pair)]

    def needs(self):
        """Bytes of host memory, for an image; the driver's own way has all in the process besides, and the daemon may have."""
        return (self.size + self.host) * 9 // 8 * (2 if self.driver_rounds or self.switch == IN_HOST_MEMORY else 1)

    def setting(self):
        """What of `[checkpoint]` is changed, as a line."""
        if self.switch == IN_HOST_MEMORY:
            return f"staging = {self.size * 9 // 8}"
        return f"application_first = {str(self.switch == ALWAYS_FIRST).lower()}" if self.switch else None

    def guess(self, protocol, rate):
        """Seconds that one checkpoint takes, where images take so many GB/s."""
        known = [it["wall_s"] for it in self.samples.get(protocol, [])]
        if known:
            return max(known) * 1.1
        gb = (self.size + self.host) / 1e9
        if protocol == DRIVER:
            return 4 + gb * 1.2
        return 2 + (2 if protocol == "recopy" else 1) * gb / rate

    def start_guess(self):
        return 25 + self.gib if self.kind in TORCH else 3 + self.gib * 0.1

    def wanted(self):
        """Protocols that do not fail again and again."""
        return [it for it in self.protocols if self.failures.get(it, 0) < 2]


def plan(o, real):
    """What is measured, the first first."""
    order = ORDER if real else software_order(o)
    sizes = [float(it) for it in o.sizes.split(",")] if o.sizes and real else None
    known = real and importlib.util.find_spec("torch")
    items = []
    for kind, gib, rounds, driver_rounds in order:
        if (kind in TORCH and not known) or (sizes and gib not in sizes):
            continue
        items += of_kind(o, kind, gib, min(rounds, o.rounds), driver_rounds)
    return [it for it in items if not o.only or re.search(o.only, it.name)]


def of_kind(o, kind, gib, rounds, driver_rounds):
    asked = o.protocols.split(",")
    protocols = [it for it in ONLY.get(kind, PROTOCOLS) if it in asked]
    if DRIVER not in asked or gib > o.driver_most:
        driver_rounds = 0
    return [Item(kind, gib, rounds, driver_rounds, protocols, switch) for switch in SWITCHES.get(kind, (None,))]


def software_order(o):
    """On the software GPU, whose figures show only that the benchmark works: one of each, and little."""
    sizes = [float(it) for it in o.sizes.split(",")] if o.sizes else [1 / 256]
    return [(kind, gib, o.rounds, 1) for gib in sizes for kind in STEPS if kind != "decode13b"]
