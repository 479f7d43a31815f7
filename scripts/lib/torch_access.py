"""What the programs of tests/torch write, beside what Rekindle expects them to write (`[access] report` of the daemon): each
runs once, with a daemon of its own, whose log then has the counts of each of its processes."""

import collections
import concurrent.futures
import json
import os
import re
import subprocess
import time

from bench_common import Daemon
from torch_program import Program, read

LIMIT_MIB = 16384  # of GPU memory; of what has more, nothing is hashed
COUNTS = ("graphs", "exact", "named_total", "watched", "unwatched")
CLASSES = ("values", "signature", "everything")


def reports(log):
    """The counts of all clients that are gone, as a daemon's log tells them."""
    return [json.JSONDecoder().raw_decode(line, line.index("{"))[0] for line in log.splitlines() if " accesses: {" in line]


def added(all):
    """Reports, or sums of reports, as one."""
    whole = {"launches": {name: sum(r["launches"][name] for r in all) for name in CLASSES}}
    whole.update({name: sum(r[name] for r in all) for name in COUNTS})
    longest = max((len(r["named"]) for r in all), default=0)
    whole["named"] = [sum(r["named"][i] for r in all if i < len(r["named"])) for i in range(longest)]
    outside = collections.defaultdict(collections.Counter)
    for each in (o for r in all for o in r["outside"]):
        outside[each["by"]].update({key: each.get(key, 1) for key in ("units", "times", "size")})
    whole["outside"] = [{"by": by, **counts} for by, counts in sorted(outside.items())]
    return whole


def summary(all):
    """What is said of reports together: shares of launches, and how many allocations one names."""
    whole = added(all)
    launches, named = sum(whole["launches"].values()), sum(whole["named"])
    whole["shares"] = {name: round(count / launches, 5) if launches else None for name, count in whole["launches"].items()}
    whole["named_mean"] = round(whole["named_total"] / named, 3) if named else None
    whole["writes_outside"] = sum(o["times"] for o in whole["outside"])
    return whole


def observe(name, place, opts, driver):
    """Its line of the result. A program that takes longer than the limit is cut there; what it did until then is counted."""
    folder = os.path.join(place, name + ".daemon")
    os.makedirs(folder)
    config = os.path.join(folder, "rekindled.toml")
    with open(config, "w") as file:
        file.write(f"[access]\nreport = true\nlimit_mib = {LIMIT_MIB}\n")
    daemon = Daemon(opts.stage, driver, folder, config=config)
    line = {"name": name, "result": "ok"}
    try:
        daemon.wait_workers(1)
        program, started = Program(name, place, opts, None, daemon.socket), time.monotonic()
        process = program.start("access", True)
        try:
            if process.wait(timeout=opts.limit) != 0:
                line.update(result=f"it ends with {process.returncode}", stderr=read(program.path("access.err"))[-1500:])
        except subprocess.TimeoutExpired:
            line["result"] = "cut"
        finally:
            line.update(seconds=round(time.monotonic() - started, 1), steps=program.progress())
            program.kill(process)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and len(reports(daemon.said())) < len(re.findall(" attached pid=", daemon.said())):
            time.sleep(0.05)
        each = reports(daemon.said())
        line.update(clients=len(each), **summary(each))
        stopped = sorted({r["stopped"] for r in each if r["stopped"]})
        if stopped:
            line["stopped"] = stopped
    except SystemExit as why:  # the daemon has not come up
        line["result"] = str(why)[-600:]
    finally:
        daemon.stop()
    return line


def show(line):
    if "launches" not in line:
        return print(f"access: {line['name']:16} {line['result']}", flush=True)
    shares = "/".join("-" if share is None else f"{100 * share:.1f}" for share in line["shares"].values())
    print(f"access: {line['name']:16} {line['result']}, {line['seconds']} s, {line['steps']} steps, {line['clients']} clients, "
          f"{sum(line['launches'].values())} launches, (a)/(b)/(c) {shares} %, {line['named_mean']} allocations each, "
          f"{line['exact']} copies, watched {line['watched']} of {line['watched'] + line['unwatched']}, "
          f"outside {line['writes_outside']}", flush=True)
    for each in line["outside"][:5]:
        print(f"        {each['times']} times, {each['units']} allocations, {each['size']} bytes, by {each['by'][:150]}")
    for why in line.get("stopped", []):
        print(f"        not watched any more: {why[:200]}")
    if "stderr" in line:
        print("        " + "\n        ".join(line["stderr"].splitlines()[-6:]), flush=True)


def report(names, place, opts, driver, keep):
    """Calls `keep` with what goes into the result, whenever a program has ended, which is printed then."""
    lines = []
    with concurrent.futures.ThreadPoolExecutor(opts.jobs) as pool:
        for done in concurrent.futures.as_completed([pool.submit(observe, name, place, opts, driver) for name in names]):
            lines.append(done.result())
            show(lines[-1])
            lines.sort(key=lambda line: names.index(line["name"]))
            counted = [line for line in lines if "launches" in line]
            together = {"clients": sum(line["clients"] for line in counted), **summary(counted)}
            keep({"access_limit_mib": LIMIT_MIB, "programs": lines, "together": together,
                  "failed": [line["name"] for line in lines if line["result"] not in ("ok", "cut")]})
    show({"name": "together", "result": "", "seconds": "-", "steps": "-", **together})
