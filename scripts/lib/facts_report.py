"""What the benchmark `facts` says: spreads over rounds, a matrix of calls and states, whether addresses are the same."""

from bench_common import spread

# What a line of a program is about, beside its figures.
ABOUT = ("call", "waited_for", "content", "threads", "buffers", "kib", "read", "wait", "hash", "direct", "how", "unmapped")
STATES = ("reserved", "mapped", "readonly", "ready")


def figures(runs):
    """By name: the spread of a number, or the one word that all runs have, or all words."""
    samples = {}
    for run in runs:
        for line in run["lines"]:
            label = " ".join(f"{line[key]}" if isinstance(line[key], str) else f"{key} {line[key]}" for key in ABOUT if key in line)
            for key, value in line.items():
                if key in ABOUT or key == "addresses" or value is None:
                    continue
                name = f"{label} {key}".strip()
                if isinstance(value, dict):
                    for part, number in value.items():
                        samples.setdefault((name, part), []).append(number)
                else:
                    samples.setdefault((name, ""), []).append(value)
    found = {}
    for (name, part), values in samples.items():
        if all(isinstance(it, (int, float)) and not isinstance(it, bool) for it in values):
            value = spread(values)
        else:
            words = sorted({str(it) for it in values})
            value = " / ".join(words)
        if part:
            found.setdefault(name, {})[part] = value
        else:
            found[name] = value
    return found


def compare_addresses(results):
    """Whether each run of B4 had code and variables where the first run of its kind without copies had them."""
    same = {}
    for name, runs in results.items():
        if not name.startswith("B4"):
            continue
        kind = name.rsplit(" ", 1)[0]
        lists = [line["addresses"] for of in dict.fromkeys((f"{kind} idle", name)) for run in results.get(of, []) for line in run["lines"] if "addresses" in line]
        if lists:
            same[name] = {"runs": len(lists), "same_as_the_first": sum(it == lists[0] for it in lists)}
    return same


def displaced(results):
    """In how many runs of B10 code lay elsewhere than where nothing had happened before it was loaded."""
    moved = {}
    for name, runs in results.items():
        if not name.startswith("B10"):
            continue
        control = "B10 nothing reserved" if name.endswith(" reserved") else "B10 nothing"
        expected, own = (
            [[line["before"], line["after"]] for run in of for line in run["lines"] if "after" in line]
            for of in (results.get(control, []), runs)
        )
        if expected:
            moved[name] = {"runs": len(own), "moved": sum(it != expected[0] for it in own)}
    return moved


def one(it, digits=3):
    """A median with its range, where there is one."""
    if isinstance(it, str):
        return it
    text = f"{it['median']:.{digits}f}"
    text = text.rstrip("0").rstrip(".") if digits else text
    return text if it["low"] == it["high"] else f"{text} [{it['low']:.{digits}f}, {it['high']:.{digits}f}]"


def short(line):
    """A line of B3 in a word or two."""
    if "call" in line:
        return "" if line["result"] == "CUDA_SUCCESS" else f"{short_error(line['result'])} by {line['call'].removeprefix('cu')}"
    if "waited_for" in line:
        return "" if line["result"] == "CUDA_SUCCESS" else f"{short_error(line['result'])} waiting"
    if "content" in line:
        return "" if line.get("right") else "WRONG CONTENT"
    if "context_afterwards" in line:
        return ""
    return "?" if "not_supported" not in line else f"no {line['not_supported']}"


def short_error(name):
    return name.removeprefix("CUDA_ERROR_").lower()


def answer(run):
    """What a call did in a state of memory: "ok", or its first failure."""
    failures = [it for it in map(short, run["lines"]) if it]
    if run["ended"] != "ok":
        failures.append(run["ended"])
    return failures[0] if failures else "ok"


def matrix(experiments):
    cells = {}
    for it in experiments:
        _, state, case = it["name"].split(" ", 2)
        cells.setdefault(case, {})[state] = answer(it["runs"][0])
    if not cells:
        return
    print("\nB3: what a call does with memory that is ...")
    rows = [("", *STATES), *((case, *(states.get(it, "-") for it in STATES)) for case, states in cells.items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def print_figures(found):
    width = max((len(name) for name in found), default=0)
    for name, it in found.items():
        if isinstance(it, dict) and "median_us" in it:
            print(f"  {name:{width}}  {one(it['median_us'])} us, p99 {one(it['p99_us'])}, most {one(it['max_us'])}; "
                  f"{one(it['n'], 0)} calls, {one(it['total_ms'])} ms in all")
        elif isinstance(it, dict) and "median" not in it:
            print(f"  {name:{width}}  {', '.join(f'{part} {one(value)}' for part, value in it.items())}")
        else:
            print(f"  {name:{width}}  {one(it)}")


def report(document):
    print(f"{document['device']}, {document['driver']}; {document['seconds']} s; median [lowest, highest] over rounds")
    states = [it for it in document["experiments"] if it["name"].startswith("B3")]
    for it in document["experiments"]:
        if it in states:
            continue
        ends = [run["ended"] for run in it["runs"]]
        print(f"\n{it['name']}: {', '.join(sorted(set(ends)))}" + (f" ({len(ends)} runs)" if len(ends) > 1 else ""))
        print_figures(it["figures"])
        for run in it["runs"]:
            if run.get("stderr") and run["ended"] != "ok":
                print("  " + run["stderr"].strip().splitlines()[-1])
    matrix(states)
    for name, it in document["same_addresses"].items():
        print(f"\n{name}: {it['same_as_the_first']} of {it['runs']} runs have the addresses of the first one without copies", end="")
    for name, it in document["displaced"].items():
        print(f"\n{name}: code moved in {it['moved']} of {it['runs']} runs", end="")
    missing = [it["name"] for it in document["experiments"] if any(run["ended"] == "not supported" for run in it["runs"])]
    bad = [it["name"] for it in document["experiments"] if any(run["ended"] not in ("ok", "not supported") for run in it["runs"])]
    for what, names in (("not supported by this driver", missing), ("did not end well", bad), ("left out, the budget being spent", document["left_out"])):
        if names:
            print(f"\n{what}: {', '.join(names)}")
    print()
