"""What the benchmark `checkpoint` says: spreads, tables, what was measured beside what it is to be, and the file of results."""

from bench_common import about, criu_version, spread, write_json
from checkpoint_items import ALWAYS_FIRST, DRIVER, INCREMENTAL, IN_HOST_MEMORY, NEVER_FIRST, TORCH

THIRTEEN = ("llama13b", "decode13b")  # decoding with 13 billion parameters

# Columns of the table: a head, what of a sample it is, by what it is divided, and how many digits it has.
COLUMNS = (
    ("gap", "gap_ms", 1, 1), ("gaps", "gaps_ms", 1, 1), ("freeze", "freeze_ms", 1, 1), ("stall", "stall_ms", 1, 1),
    ("precopy", "pre_copy_ms", 1, 0), ("quiesce", "quiesce_ms", 1, 1), ("hash", "hash_ms", 1, 1), ("clone", "clone_ms", 1, 1),
    ("copy", "copy_ms", 1, 0), ("write", "write_ms", 1, 0), ("resume", "resume_ms", 1, 1), ("durable", "durable_ms", 1, 0),
    ("GB/s", "copy_gb_s", 1, 1), ("GPU GB", "gpu_bytes", 1e9, 2), ("CPU MB", "cpu_bytes", 1e6, 1), ("ours", "cpu_ours_bytes", 1e6, 1),
    ("pinned", "cpu_pinned_bytes", 1e6, 1), ("speed", "throughput", 0.01, 0),
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


class Aims:
    """What was measured of one protocol beside what it is to be."""

    def __init__(self, item, protocol, figures, rates):
        self.item, self.protocol, self.figures, self.rates = item, protocol, figures, rates
        self.found = []

    def median(self, name):
        return self.figures.get(name, {}).get("median")

    def rate(self, name):
        return self.rates.get(name, {}).get("median")

    def add(self, what, value, at_most=None, at_least=None):
        reached = value <= at_most if at_least is None else value >= at_least
        self.found.append({"what": what, "value": value, "at_most": at_most, "at_least": at_least, "reached": reached})

    def all(self):
        self.stall()
        self.copying()
        if self.item.kind in THIRTEEN and self.protocol in ("clone", "cow"):
            self.thirteen()
        if self.protocol == "clone" and self.median("throughput"):
            self.add("of the undisturbed speed while it is copied", self.median("throughput"), at_least=0.97)
        if self.protocol == INCREMENTAL and (self.item.idle or self.item.kind == "llama13b") and "clone" in self.item.samples:
            first = numbers(self.item.samples["clone"])["gpu_bytes"]["median"]
            self.add("of the first image's bytes of the GPU", self.median("gpu_bytes") / first, 0.01)
        if self.item.kind in TORCH and self.median("pages_bytes"):
            self.add("MB of memory in the CPU's image", self.median("pages_bytes") / 1e6, 500)
        if self.median("cpu_ours_bytes") is not None:
            self.add("MB of the CPU's image are Rekindle's", self.median("cpu_ours_bytes") / 1e6, 10)
        return self.found

    def stall(self):
        """What is hashed or copied while CRIU's freeze lasts costs nothing."""
        rate = self.rate({"clone": "device_copy", "cow": "device_hash"}.get(self.protocol))
        handled = self.median({"clone": "clone_bytes", "cow": "hash_bytes"}.get(self.protocol)) or self.median("copy_bytes")
        if rate and handled and self.median("stall_ms") is not None:
            most = 3 + handled / (0.85 * rate) / 1e6
            self.add(f"ms that the GPU's side costs (3 ms and {handled / 1e9:.1f} GB at 85 % of the device's rate)", self.median("stall_ms"), most)

    def copying(self):
        """Where there is room in host memory, `stop` holds the program until all is there; else the slower of link and sink
        counts."""
        link, sink, image = self.rate("link_to_host"), self.rate("sink"), self.median("image_gb_s")
        held = [self.median(it) for it in ("stall_ms", "freeze_ms", "copy_bytes")]
        if self.item.switch == IN_HOST_MEMORY and self.protocol == "stop" and link and None not in held:
            rate = held[2] / (held[0] + held[1]) / 1e6
            self.add(f"of the link's rate while copying to host memory ({rate:.1f} GB/s)", rate / link, at_least=0.95)
        elif link and sink and link < sink and self.median("copy_gb_s"):
            self.add("of the link's rate while copying", self.median("copy_gb_s") / link, at_least=0.95)
        if image and link and sink:
            self.add("of the slower rate of link and sink, until the image is durable", image / min(link, sink), at_least=0.9)

    def thirteen(self):
        gaps, freeze = self.median("gaps_ms"), self.median("freeze_ms")
        if gaps is not None and freeze is not None:
            self.add("ms of gaps (CRIU's freeze and 20 ms)", gaps, freeze + 20)
            self.add("ms of gaps", gaps, 700)


def report(o, place, rates, items, left_out, took):
    """Writes the JSON, and returns it."""
    workloads = [workload(item, rates, place.real) for item in items if item.samples or item.notes]
    config = None
    if o.config:
        with open(o.config) as file:
            config = file.read()
    document = {**about(o, "checkpoint"), "criu": criu_version(place.criu), "config": config, "images": place.images_are,
                "seconds": took, "rates": rates, "left_out": left_out, "workloads": workloads}
    write_json(o.out, document)
    return document


def workload(item, rates, real):
    figures = {protocol: numbers(samples) for protocol, samples in item.samples.items()}
    reached = {protocol: Aims(item, protocol, it, rates).all() for protocol, it in figures.items() if real and protocol != DRIVER}
    return {"name": item.name, "gib": item.gib, "switch": item.switch, "notes": item.notes, "memory": item.memory,
            "figures": figures, "aims": reached, "samples": item.samples}


def show(document):
    print(f"\n{document['device']}, {document['driver']}, Linux {document['kernel']}, CRIU {document['criu']}, {document['commit']}; "
          f"images {document['images']}")
    print("GB/s: " + ", ".join(f"{name.replace('_', ' ')} {it['median']:.1f}" for name, it in document["rates"].items()))
    for it in document["workloads"]:
        show_workload(it)
    show_switches(document["workloads"])
    if document["left_out"]:
        print("no time for: " + "; ".join(document["left_out"]))


def show_workload(it):
    figures = it["figures"]
    step = next((of["step_ms"]["median"] for of in figures.values() if "step_ms" in of), None)
    title = f"\n{it['name']}" + (f", {step:.2f} ms a step" if step else "") + ": milliseconds, GB, GB/s, percent; median, lowest..highest"
    rows = [(f"{protocol} x{len(it['samples'][protocol])}", of) for protocol, of in figures.items() if protocol != DRIVER]
    if rows:
        table(title, rows, COLUMNS)
    if DRIVER in figures:
        table("" if rows else title, [(f"{DRIVER} x{len(it['samples'][DRIVER])}", figures[DRIVER])], DRIVER_COLUMNS)
    for protocol, of in figures.items():
        parts = {name[7:-3]: value["median"] for name, value in of.items() if name.startswith("freeze_") and name != "freeze_ms"}
        if parts:
            print(f"  {protocol}: ms of CRIU's freeze by its log: " + ", ".join(f"{name} {value:.1f}" for name, value in parts.items()))
    for protocol, of in it["aims"].items():
        for one in of:
            limit = f"at most {one['at_most']:.3g}" if one["at_least"] is None else f"at least {one['at_least']:.3g}"
            print(f"  {protocol}: {one['value']:.3g} {one['what']}: {limit}, {'reached' if one['reached'] else 'not reached'}")
    for way, memory in it["memory"].items():
        parts = ", ".join(f"{who} {size / 1e6:.1f}" for who, size in sorted(memory.items(), key=lambda of: -of[1]))
        print(f"  MB that CRIU would write {way}: {sum(memory.values()) / 1e6:.1f}: {parts}")
    for note in it["notes"]:
        print(f"  {note}")


def show_switches(workloads):
    """Speed while a copy goes on, where the application's transfers come first and where they do not."""
    speeds = {(it["gib"], it["switch"]): it["figures"].get("clone", {}).get("throughput", {}).get("median") for it in workloads}
    for gib in sorted({gib for gib, _ in speeds}):
        first, never = speeds.get((gib, ALWAYS_FIRST)), speeds.get((gib, NEVER_FIRST))
        if first and never:
            print(f"batches {gib:g} GiB while copied by clone: {100 * first:.1f} % of the undisturbed speed with the application's "
                  f"transfers first, {100 * never:.1f} % without")
