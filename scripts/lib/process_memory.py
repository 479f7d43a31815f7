"""What CRIU would write of a process's memory, by whose it is: from `/proc/PID/smaps`, also of a process that cannot be dumped.

Of private mappings CRIU writes pages of the process's own (`Anonymous`), of memory that processes share all that is there,
of shared mappings of files nothing (criu/mem.c, `should_dump_page`). A driver's devices it cannot write at all.
"""

import re

# Whose a mapping is, by what is in its name; the first that fits.
OWNERS = (
    ("ring", re.compile(r"/memfd:rekindle-ring ")), ("staging", re.compile(r"/memfd:rekindle-staging ")),
    ("pinned", re.compile(r"/memfd:rekindle-pinned-")), ("interposer", re.compile(r"/rekindle/lib(cuda|nvidia-ml)\.so")),
    ("devices", re.compile(r"^/dev/(nvidia|dri)")), ("driver", re.compile(r"/lib(cuda|nvidia-[^/]*|simcuda)\.so")),
    ("heap", re.compile(r"^\[heap\]")), ("stack", re.compile(r"^\[stack\]")), ("kernel", re.compile(r"^\[v")),
    ("anonymous", re.compile(r"^(\[anon.*\])?$")), ("shared", re.compile(r"^/(memfd:|dev/zero|SYSV|dev/shm/)")),
    ("files", re.compile(r".")),
)
OURS = ("ring", "staging", "interposer")
HEAD = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ \d+\s*(.*)")


class Mapping:
    """One mapping, with its fields in bytes."""

    def __init__(self, head):
        self.start, self.end = int(head[1], 16), int(head[2], 16)
        self.shared, self.name, self.fields = head[3].endswith("s"), head[4], {}

    def written(self, who):
        """What of it CRIU would write."""
        if who in ("kernel", "devices") or (self.shared and who == "files"):
            return 0
        return self.fields["Rss"] if self.shared else self.fields["Anonymous"] + self.fields.get("Swap", 0)


def mappings(pid):
    found = []
    with open(f"/proc/{pid}/smaps", errors="replace") as file:
        for line in file:
            head = HEAD.match(line)
            if head:
                found.append(Mapping(head))
                continue
            key, _, rest = line.partition(":")
            words = rest.split()
            if len(words) == 2 and words[1] == "kB":
                found[-1].fields[key] = int(words[0]) * 1024
    return found


def owner(name):
    return next(who for who, pattern in OWNERS if pattern.search(name))


def would_be_written(pid):
    """Bytes by owner. A mapping without a name right behind a library's is the library's: its variables."""
    found, before = {}, None
    for it in mappings(pid):
        who = owner(it.name)
        if not it.name and before and before.end == it.start and owner(before.name) in ("interposer", "driver"):
            who = owner(before.name)
        found[who] = found.get(who, 0) + it.written(who)
        before = it
    return {who: size for who, size in found.items() if size}
