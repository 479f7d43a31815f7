"""What device, link and sink do by themselves: what a checkpoint's figures are compared with, measured in the same run."""

import json
import os
import sys

import sinks
from bench_common import native_folder, run, spread

HERE = os.path.dirname(os.path.abspath(__file__))
GIB = 1 << 30
THREADS = (1, 4, 8, 16)


def measure(o, place, say):
    """Spreads by name, in GB/s; without what cannot be measured."""
    def ask(command):
        try:
            return json.loads(run(command, native_folder(o.stage, o.driver)))
        except (SystemExit, ValueError) as error:  # one rate less, not the whole benchmark
            say(str(error))
            return {}
    return {**of_device(o, place, ask), **of_link(o, place, ask), **of_sinks(place)}


def of_device(o, place, ask):
    command = [f"{o.stage}/bin/rekindle-bench", "hash", "--cuda-driver", o.driver]
    command += ["--kib", "4194304", "--repeats", "11"] if place.real else ["--kib", "64", "--repeats", "2", "--piece-kib", "64"]
    figures = ask(command).get("figures", [])
    return {f"device_{kind}": spread(it[kind][1:]) for it in figures for kind in ("copy", "hash", "copy_and_hash")}


def of_link(o, place, ask):
    link = ask([sys.executable, f"{HERE}/driver_calls.py", o.driver, "rates", "1024" if place.real else "4"])
    return {f"link_{way}": spread(values) for way, values in link.items()}


def of_sinks(place):
    """Of the images' folder by threads, into one file and into one each; the fastest; and of memory with ordinary pages."""
    size = min(4 * GIB if place.real else 1 << 26, sinks.free(place.images) // 2)
    rates = {}
    for threads in [it for it in THREADS if it <= os.cpu_count()]:
        rates[f"sink_{threads}_threads"] = twice(place.images, size, threads, 1)
        if threads > 1:
            rates[f"sink_{threads}_files"] = twice(place.images, size, threads, threads)
    rates["sink"] = max(rates.values(), key=lambda it: it["median"])
    with sinks.in_memory(place.folder, False) as ordinary:
        if ordinary:
            most = max(it for it in THREADS if it <= os.cpu_count())
            rates["ordinary_pages_1_thread"] = twice(ordinary, size // 4, 1, 1)
            rates["ordinary_pages"] = twice(ordinary, size // 2, most, most)
    return rates


def twice(folder, size, threads, files):
    return spread([sinks.write_rate(folder, size, threads, files) for _ in range(2)])
