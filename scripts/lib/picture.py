#!/usr/bin/env python3
"""Draw docs/checkpoint.svg, the README's picture, from a result of `scripts/bench checkpoint`.

  picture.py            draw it
  picture.py --check    exit status 1 if it is not what the result says

Each bar is a decoding program in time, with the longest pause between two of its steps as a gap, and the moment at which its image is
complete.
"""

import json
import os
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RESULT = "docs/results/2026-11-23-H200-checkpoint.json"
PICTURE = "docs/checkpoint.svg"
WORKLOAD = "decode13b"
ROWS = [("driver", "the driver's own checkpoint, and CRIU"), ("clone", "Rekindle")]

WIDTH, LEFT, RIGHT, TOP, BAR, PITCH = 860, 24, 24, 58, 30, 92
BEFORE, AFTER = 1.0, 1.5  # seconds of work drawn on either side
WORKS, PAUSES, INK, PALE = "#2f7d4f", "#f3e3df", "#222222", "#666666"


def text(x, y, content, size=13, colour=INK, anchor="start", weight="normal"):
    content = content.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}">{content}</text>'


def rectangle(x, y, width, colour):
    return f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{BAR}" fill="{colour}"/>'


def seconds(ms):
    return f"{ms / 1000:.1f} s" if ms >= 1000 else f"{ms:.0f} ms"


def draw():
    with open(os.path.join(ROOT, RESULT), encoding="utf-8") as file:
        result = json.load(file)
    work = next(it for it in result["workloads"] if it["name"] == WORKLOAD)
    figures = {name: {key: work["figures"][name][key]["median"] for key in ("gap_ms", "durable_ms", "step_ms")} for name, _ in ROWS}
    longest = max(it["gap_ms"] for it in figures.values()) / 1000
    whole = BEFORE + longest + AFTER
    scale = (WIDTH - LEFT - RIGHT) / whole
    at = lambda moment: LEFT + moment * scale
    height = TOP + PITCH * len(ROWS) + 30
    step = figures["clone"]["step_ms"]
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        text(LEFT, 26, f"A decode with the memory of a model of 13 billion parameters, a step every {step:.1f} ms, is checkpointed", 15, weight="bold"),
    ]
    for row, (name, what) in enumerate(ROWS):
        y, it = TOP + PITCH * row, figures[name]
        gap, durable = it["gap_ms"] / 1000, it["durable_ms"] / 1000
        out.append(text(LEFT, y + 12, f"{what}: stands still for {seconds(it['gap_ms'])}", weight="bold"))
        y += 20
        out.append(rectangle(at(0), y, BEFORE * scale, WORKS))
        out.append(rectangle(at(BEFORE), y, gap * scale, PAUSES))
        out.append(rectangle(at(BEFORE + gap), y, (whole - BEFORE - gap) * scale, WORKS))
        mark = at(BEFORE + durable)
        out.append(f'<line x1="{mark:.1f}" x2="{mark:.1f}" y1="{y - 3}" y2="{y + BAR + 6}" stroke="{INK}" stroke-width="1.5"/>')
        late = mark > WIDTH * 0.7
        out.append(text(mark + (-5 if late else 5), y + BAR + 14, f"the image is complete after {seconds(it['durable_ms'])}", 12, PALE,
                        "end" if late else "start"))
    source = f"{result['device']}, driver {result['driver']}, {result['cores']} cores; images {result['images'].split(' (')[0]}; longest pause between two steps, median; {result['date']}"
    out.append(text(LEFT, height - 12, source, 11, PALE))
    out.append("</svg>")
    return "\n".join(out) + "\n"


def main():
    path, drawn = os.path.join(ROOT, PICTURE), draw()
    if "--check" in sys.argv[1:]:
        with open(path, encoding="utf-8") as file:
            if file.read() != drawn:
                sys.exit(f"{PICTURE}: it is not what {RESULT} says: run scripts/lib/picture.py")
        return
    with open(path, "w", encoding="utf-8") as file:
        file.write(drawn)


if __name__ == "__main__":
    main()
