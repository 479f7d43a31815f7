"""Check what the rules and the dashboard ask for against a running Prometheus that scrapes a daemon.

  check_queries.py URL SCRAPE RULES DASHBOARD DOCUMENTATION

URL is Prometheus's, and SCRAPE a file with the daemon's metrics. Every metric that RULES or DASHBOARD mentions must be in the scrape,
or, since some have no series before their first event, in the table of DOCUMENTATION; a unit test of the daemon compares that table
with the code. All metrics of the scrape must be in the table too. Every query must be one that Prometheus executes, and every rule
must be in force. Exit status 1: something is not so.
"""

import json
import re
import sys
import time
import urllib.parse
import urllib.request

NAME = re.compile(r"\brekindle_[a-z0-9_]+")
# What Grafana puts in, as far as it matters to Prometheus.
VARIABLES = {"$__rate_interval": "1m", "$job": "rekindle", "$instance": ".*"}


def api(url, path, **parameters):
    """The data of an answer; an error is its text."""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}", timeout=30) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        return json.load(error)["error"]


def families(scrape):
    """The names in the scrape's TYPE lines, with their types."""
    return dict(re.findall(r"^# TYPE (\S+) (\S+)$", scrape, re.MULTILINE))


def documented(text):
    """The names in the first column of the table of metrics."""
    rows = [line for line in text.splitlines() if line.startswith("| `rekindle_")]
    return {name for row in rows for name in re.findall(r"`([^`]*)`", row.split("|")[1])}


def without_part(name, known):
    """The family of a name, which may be of a part of a histogram."""
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    return name if name in known else base


def expressions(dashboard):
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def main():
    url, scrape, rules, dashboard, documentation = sys.argv[1:]
    scrape, rules, documentation = (open(path, encoding="utf-8").read() for path in (scrape, rules, documentation))
    dashboard = json.load(open(dashboard, encoding="utf-8"))
    problems = []

    there, listed = families(scrape), documented(documentation)
    problems += [f"{name} is not documented" for name in there if name not in listed]
    known = set(there) | listed
    asked = expressions(dashboard)
    variables = [it["query"]["query"] for it in dashboard["templating"]["list"] if it["type"] == "query"]
    mentioned = {name for text in [rules, *asked, *variables] for name in NAME.findall(text)}
    problems += [f"there is no metric {name}" for name in mentioned if without_part(name, known) not in known]

    with_series = 0
    for expression in asked:
        query = expression
        for variable, value in VARIABLES.items():
            query = query.replace(variable, value)
        answer = api(url, "query", query=query)
        if isinstance(answer, str):
            problems.append(f"{expression}: {answer}")
        else:
            with_series += bool(answer["result"])
    if not with_series:
        problems.append("no query of the dashboard has a result")

    # A rule that was never evaluated is of unknown health.
    deadline = time.monotonic() + 60
    while True:
        found = [rule for group in api(url, "rules")["groups"] for rule in group["rules"]]
        if all(rule["health"] != "unknown" for rule in found) or time.monotonic() > deadline:
            break
        time.sleep(0.2)
    if not found:
        problems.append("Prometheus has no rules")
    problems += [f"rule {it['name']}: {it['health']} {it.get('lastError', '')}" for it in found if it["health"] != "ok"]

    print(f"{len(mentioned)} metrics, {len(asked)} queries ({with_series} with a result), {len(found)} rules")
    for problem in problems:
        print(f"BAD {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
