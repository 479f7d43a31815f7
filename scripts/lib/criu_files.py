"""What CRIU's own files say of how long a dump took: its statistics, and the times in its log."""

import re
import struct

STATS = ("freezing", "frozen", "memdump", "memwrite")  # the first fields of CRIU's DumpStatsEntry, in microseconds
# What of a freeze a line of the log begins; the first that fits. It lasts until the next of these lines.
PARTS = (
    ("collect", re.compile(r"Seized task")), ("ring", re.compile(r"Dumping memfd:rekindle-ring ")),
    ("staging", re.compile(r"Dumping memfd:rekindle-staging ")), ("pinned", re.compile(r"Dumping memfd:rekindle-pinned-")),
    ("shared", re.compile(r"Dumping memfd:|Dumping shared memory")), ("mappings", re.compile(r"Dumping task|Dumping path|Handling VMA")),
    ("parasite", re.compile(r"Set up parasite")), ("pages", re.compile(r"Dumping pages")), ("rest", re.compile(r"Dumping core")),
    ("", re.compile(r"rekindle: the processes run again|Unseizing")),
)
LINE = re.compile(r"^\((\d+\.\d+)\) (.*)")


def of_dump(image):
    """Milliseconds of both, by names that begin with criu_ and freeze_."""
    return {**stats(f"{image}/stats-dump"), **freeze_parts(f"{image}/dump.log")}


def freeze_parts(path):
    """What the processes stood still for, by the log: CRIU begins a line when it begins with something."""
    found, part, since = {}, "", 0.0
    try:
        with open(path, errors="replace") as file:
            for line in map(LINE.match, file):
                begun = line and next((name for name, pattern in PARTS if pattern.search(line[2])), None)
                if begun is None or (begun and not part and begun != "collect"):
                    continue
                if part:
                    key = f"freeze_{part}_ms"
                    found[key] = found.get(key, 0) + (float(line[1]) - since) * 1e3
                part, since = begun, float(line[1])
    except OSError:
        pass
    return found


def number(data, at):
    """A number of Protocol Buffers, and where it ends."""
    value = shift = 0
    while True:
        value |= (data[at] & 127) << shift
        shift, at = shift + 7, at + 1
        if data[at - 1] < 128:
            return value, at


def fields(data):
    """Numbers and bytes with the numbers of their fields."""
    at = 0
    while at < len(data):
        key, at = number(data, at)
        value, at = number(data, at)
        if key & 7 == 2:
            value, at = data[at:at + value], at + value
        yield key >> 3, value


def stats(path):
    """After magics and a size `stats-dump` has an entry, in whose first field are those of a dump, numbers only."""
    try:
        with open(path, "rb") as file:
            data = file.read()
        size = struct.unpack_from("<I", data, 8)[0]
        dump = dict(fields(dict(fields(data[12:12 + size]))[1]))
        return {f"criu_{name}_ms": dump[i + 1] / 1000 for i, name in enumerate(STATS)}
    except (OSError, KeyError, IndexError, struct.error, TypeError):
        return {}
