"""When the steps of a program end: a file that the program maps and writes into, as `steps` of tests/apps has it, and what a
checkpoint did to them.

The file is numbers of 64 bits: how many steps have ended, and then when each has (nanoseconds of CLOCK_MONOTONIC), from
the start again where the file ends.
"""

import mmap
import statistics
import struct

WORDS = 1 << 20  # as many steps as any run has: 8 MiB, of which only what is written takes memory


class Times:
    """The file, from either side."""

    def __init__(self, path, make=False):
        if make:
            with open(path, "wb") as file:
                file.truncate(8 * WORDS)
        self.file = open(path, "r+b")
        self.words = mmap.mmap(self.file.fileno(), 0)
        self.file.close()

    def count(self):
        return struct.unpack_from("<Q", self.words, 0)[0]

    def add(self, now):
        """A step has ended. Its time is there before the number says so."""
        count = self.count()
        struct.pack_into("<Q", self.words, 8 * (1 + count % (WORDS - 1)), now)
        struct.pack_into("<Q", self.words, 0, count + 1)

    def back_to(self, count):
        """Forgets the steps after these: a program that is restored again does them again."""
        struct.pack_into("<Q", self.words, 0, count)

    def ends(self, first=0):
        """When those steps from `first` on ended that have."""
        return [struct.unpack_from("<Q", self.words, 8 * (1 + i % (WORDS - 1)))[0] for i in range(first, self.count())]


def undisturbed(ends):
    """Of steps that nothing disturbs, in nanoseconds: the median, and the most that is usual: what 99 % of them take, or twice
    the median if that is less."""
    steps = sorted(b - a for a, b in zip(ends, ends[1:]))
    median = statistics.median(steps)
    return median, min(steps[min(len(steps) - 1, len(steps) * 99 // 100)], 2 * median)


def gaps(ends, begin, end, median, usual):
    """What the steps between two moments took over the median: the longest, and all that took longer than usual together."""
    over = [b - a - median for a, b in zip(ends, ends[1:]) if b > begin and a < end]
    return max(over, default=0), sum(it for it in over if it + median > usual)


def share(ends, stopped, begin, end, median):
    """How many steps were done from `begin` to `end`, in parts of how many are when nothing disturbs them. A step that was
    under way when the program stopped, at `stopped`, is done in part by then."""
    done = 0.0
    for a, b in zip(ends, ends[1:]):
        if b <= begin or a >= end:
            continue
        left = 1 - min(1.0, max(0.0, (stopped - a) / median)) if a < begin else 1.0
        start = max(a, begin)
        done += left if b <= end else left * (end - start) / (b - start)
    return done * median / (end - begin)
