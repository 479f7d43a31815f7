"""Draw the dashboard as a page, with the queries' results of a running Prometheus, where there is no Grafana to look at it with.

  draw.py URL DASHBOARD SECONDS > PAGE

URL is Prometheus's; the page shows the last SECONDS. Places, titles, units, legends and descriptions are those of DASHBOARD. What
Grafana adds (colours, zoom, values under the pointer) is not there.
"""

import html
import json
import re
import sys
import time
import urllib.parse
import urllib.request

COLUMN, ROW, GAP, LINES = 60, 38, 8, 5
COLOURS = ["#7eb26d", "#eab839", "#6ed0e0", "#ef843c", "#e24d42", "#1f78c1", "#ba43a9", "#705da0", "#508642", "#cca300"]


def results(url, expression, seconds, step):
    """The series of a query over the last seconds: labels and points."""
    end = time.time()
    window = {"$__rate_interval": f"{4 * step}s", "$job": "rekindle", "$instance": ".*"}
    for variable, value in window.items():
        expression = expression.replace(variable, value)
    asked = urllib.parse.urlencode({"query": expression, "start": end - seconds, "end": end, "step": step})
    with urllib.request.urlopen(f"{url}/api/v1/query_range?{asked}", timeout=30) as answer:
        found = json.load(answer)["data"]["result"]
    points = [[(at - end + seconds, float(value)) for at, value in it["values"] if value != "NaN"] for it in found]
    return [(it["metric"], them) for it, them in zip(found, points) if them]


def legend(form, labels):
    return re.sub(r"\{\{(\w+)\}\}", lambda it: labels.get(it[1], ""), form or str(labels)).strip()


def shown(value, unit):
    """A value with its unit, as Grafana writes it."""
    if unit == "percentunit":
        return f"{value * 100:.0f}%"
    if unit == "s":
        scale, name = next((it for it in ((1, "s"), (1e-3, "ms")) if abs(value) >= it[0]), (1e-6, "µs"))
        return f"{value / scale:.3g} {name}" if value else "0 s"
    base, names = (1024, ["B", "KiB", "MiB", "GiB"]) if unit == "bytes" else (1000, ["", "k", "M", "G"])
    power = next((it for it in (3, 2, 1) if abs(value) >= base**it), 0)
    after = {"Bps": "B/s", "reqps": " req/s"}.get(unit, "")
    return f"{value / base**power:.3g} {names[power]}{after}".strip()


def text(x, y, words, **attributes):
    attributes = " ".join(f'{name}="{value}"' for name, value in attributes.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{html.escape(words)}</text>'


def lines(series, unit, width, height, seconds):
    """A panel's curves above their legend."""
    left, bottom = 62, height - 20 - 14 * min(len(series), LINES)
    most = max((value for _, points in series for _, value in points), default=0) or 1
    parts = []
    for part in (0, 0.5, 1):
        y = bottom - part * (bottom - 30)
        parts.append(f'<line x1="{left}" x2="{width - 8}" y1="{y:.1f}" y2="{y:.1f}" stroke="#333"/>')
        parts.append(text(left - 4, y + 4, shown(most * part, unit), **{"text-anchor": "end"}))
    for number, (name, points) in enumerate(series):
        colour = COLOURS[number % len(COLOURS)]
        places = [
            (left + at / seconds * (width - left - 8), bottom - max(value, 0) / most * (bottom - 30)) for at, value in points
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.5" fill="{colour}"/>' for x, y in places]
        if number < LINES:
            more = f" and {len(series) - LINES} more" if number == LINES - 1 and len(series) > LINES else ""
            parts.append(text(left, bottom + 18 + 14 * number, name + more, fill=colour))
    return parts


def panel(url, it, seconds, step):
    place, unit = it["gridPos"], it["fieldConfig"]["defaults"].get("unit", "short")
    x, y = place["x"] * COLUMN, place["y"] * ROW
    width, height = place["w"] * COLUMN - GAP, place["h"] * ROW - GAP
    series = [
        (legend(target.get("legendFormat"), labels), points)
        for target in it["targets"]
        for labels, points in results(url, target["expr"], seconds, step)
    ]
    parts = [f'<rect width="{width}" height="{height}" fill="#181b1f" stroke="#333"/>', text(8, 18, it["title"], fill="#fff")]
    if not series:
        parts.append(text(width / 2, height / 2, "No data", **{"text-anchor": "middle", "font-size": 15}))
    elif it["type"] == "stat":
        for number, (name, points) in enumerate(series):
            value = shown(points[-1][1], unit)
            mappings = [option for it in it["fieldConfig"]["defaults"].get("mappings", []) for option in it["options"].items()]
            value = next((option["text"] for key, option in mappings if key == value), value)
            parts.append(text(width / 2, height / 2 + 50 * number, value, fill="#73bf69", **{"text-anchor": "middle", "font-size": 36}))
            parts.append(text(width / 2, height / 2 + 20 + 50 * number, name, **{"text-anchor": "middle"}))
    else:
        parts += lines(series, unit, width, height, seconds)
    return f'<g transform="translate({x},{y})"><title>{html.escape(it.get("description", ""))}</title>{"".join(parts)}</g>'


def main():
    url, dashboard, seconds = sys.argv[1:]
    dashboard, seconds = json.load(open(dashboard, encoding="utf-8")), float(seconds)
    step = max(1, int(seconds / 60))
    panels = [panel(url, it, seconds, step) for it in dashboard["panels"]]
    height = max(it["gridPos"]["y"] + it["gridPos"]["h"] for it in dashboard["panels"]) * ROW
    print(f"<!DOCTYPE html><title>{html.escape(dashboard['title'])}</title><body style='margin:8px;background:#111217'>")
    print(f"<svg width='{24 * COLUMN}' height='{height}' font-family='sans-serif' font-size='11' fill='#aaa'>")
    print("\n".join(panels), "</svg>", sep="\n")


if __name__ == "__main__":
    main()
