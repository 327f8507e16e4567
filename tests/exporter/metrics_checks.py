#!/usr/bin/python3
"""What others' programs make of the exporter's metrics, dashboard and rules.

usage: metrics_checks.py VPMM_SERVER BUILD_DIR

Runs the server example and Debian's prometheus, which scrapes it, and looks at the answers with promtool, with the parser
of python3-prometheus-client, and, where npm can fetch them, with Grafana's own types. A line for each check, "ok NAME" or
"FAILED NAME: why"; "skipped NAME: why" counts as nothing. Exit status 0 if none failed.
"""
import collections
import gzip
import itertools
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

SERVER, BUILD = sys.argv[1:3]
ROOT = os.path.abspath(__file__).rsplit(os.sep, 3)[0]
PROMETHEUS = os.path.join(ROOT, "exporter", "prometheus")
DASHBOARD = os.path.join(ROOT, "exporter", "grafana", "vpmm.json")
SECONDS = 3600  # that the server serves if nothing ends it
LOADED = 9  # of them, before its metrics are looked at
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
TYPES = ["@grafana/schema@11.6.16", "typescript@5.7.3"]

PATIENCE = 120  # seconds, for what comes in time: a busy machine, or one that stands still, scrapes late
failed = []


def check(name, *arguments, patience=0):
    """Calls the function of that name, again within `patience` if it raises; its last exception is the failure."""
    end = time.monotonic() + patience
    try:
        while True:
            try:
                skipped = globals()["check_" + name](*arguments)
                break
            except Exception:
                if time.monotonic() >= end:
                    raise
                time.sleep(0.5)
        print(f"skipped {name}: {skipped}" if skipped else f"ok {name}", flush=True)
    except Exception as error:  # whatever it is, it is what has failed
        failed.append(name)
        print(f"FAILED {name}: {type(error).__name__}: {error}", flush=True)


def need(condition, words):
    if not condition:
        raise AssertionError(words)


def run(*command, **options):
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **{"timeout": 600, **options})
    need(done.returncode == 0, f"{command[0]} {command[1]} ends with {done.returncode}: {done.stdout.decode()[-2000:]}")
    return done.stdout.decode()


def fetch(url, **headers):
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as reply:
        body = reply.read()
        packed = reply.headers.get("Content-Encoding") == "gzip"
    return (gzip.decompress(body) if packed else body).decode()


# ---- files ----


def check_rules():
    run("promtool", "check", "rules", os.path.join(PROMETHEUS, "vpmm.rules.yml"))


def check_alerts_fire_and_do_not():
    tests = os.path.join(PROMETHEUS, "vpmm.rules.test.yml")
    run("promtool", "test", "rules", tests)
    with open(os.path.join(PROMETHEUS, "vpmm.rules.yml")) as rules, open(tests) as text:
        rules_text, tested = rules.read(), text.read()
    alerts = re.findall(r"alert: (\w+)", rules_text)
    pools = re.findall(r"summary: .*labels\.pool.*", rules_text)
    need(all("device {{ $labels.device }} of {{ $labels.instance }}" in summary for summary in pools), str(pools))
    for alert in alerts:
        need(re.search(rf"{{eval_time: \w+, alertname: {alert}}}", tested), f"{alert} is not seen to be silent")
        need(re.search(rf"alertname: {alert}\n\s+exp_alerts:", tested), f"{alert} is not seen to fire")


def check_scrape_configuration():
    run("promtool", "check", "config", os.path.join(PROMETHEUS, "prometheus.yml"))


def panels(dashboard):
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", [])


def expressions(dashboard):
    return [target["expr"] for panel in panels(dashboard) for target in panel.get("targets", [])]


def check_dashboard():
    with open(DASHBOARD) as file:
        dashboard = json.load(file)
    ids = [panel["id"] for panel in panels(dashboard)]
    need(len(set(ids)) == len(ids), "two panels have one id")
    variables = [variable["name"] for variable in dashboard["templating"]["list"]]
    need(variables == ["datasource", "job", "instance", "device", "pool"], f"the variables are {variables}")
    need(all(variable["multi"] and variable["includeAll"] for variable in dashboard["templating"]["list"][1:]),
         "a variable without All")
    cells = set()
    for panel in panels(dashboard):
        at = panel["gridPos"]
        need(at["x"] + at["w"] <= 24, f"{panel['title']} is wider than the page")
        for cell in itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])):
            need(cell not in cells, f"{panel['title']} lies over another panel")
            cells.add(cell)
        if panel["type"] == "row":
            continue
        refs = [target["refId"] for target in panel["targets"]]
        need(refs and len(set(refs)) == len(refs), f"{panel['title']}: refIds {refs}")
        need(all(thing["datasource"]["uid"] == "${datasource}" for thing in [panel] + panel["targets"]),
             f"{panel['title']} has a data source of its own")
        need(panel["fieldConfig"]["defaults"].get("unit"), f"{panel['title']} has no unit")
        for legend in (target.get("legendFormat", "") for target in panel["targets"]):
            need("{{pool}}" not in legend or legend.startswith("{{instance}} {{device}} {{pool}}"),
                 f"{panel['title']}: pools of one name cannot be told apart by {legend}")
    for expr in expressions(dashboard):
        used = set(re.findall(r"\$\{?(\w+)", expr))
        need(used <= {*variables, "__rate_interval", "__range"}, f"{expr} has unknown variables: {used}")


def typescript():
    """The dashboard, and what is each panel's own, as constants of Grafana's types."""
    with open(DASHBOARD) as file:
        dashboard = json.load(file)
    yield 'import type { Dashboard, GraphFieldConfig, TableFieldOptions } from "@grafana/schema";\n'
    for panel in ("TimeSeries", "Stat", "Heatmap", "Table"):
        yield (f'import type {{ Options as {panel} }} from "@grafana/schema/dist/esm/raw/composable/{panel.lower()}/'
               f'panelcfg/x/{panel}PanelCfg_types.gen.js";\n')
    yield ('import type { FieldConfig as HeatmapField } from "@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/'
           'HeatmapPanelCfg_types.gen.js";\n'
           "type Json<T> = T extends string ? `${T}` : T extends number | boolean | null | undefined ? T\n"
           "  : T extends (infer U)[] ? Json<U>[] : T extends object ? { [K in keyof T]: Json<T[K]> } : T;\n")
    yield f"export const dashboard: Json<Dashboard> = {json.dumps(dashboard)};\n"
    types = {"timeseries": ("TimeSeries", "GraphFieldConfig"), "stat": ("Stat", "{}"),
             "heatmap": ("Heatmap", "HeatmapField"), "table": ("Table", "TableFieldOptions")}
    for panel in panels(dashboard):
        if panel["type"] != "row":
            options, custom = types[panel["type"]]
            config = panel["fieldConfig"]["defaults"].get("custom", {})
            yield f"export const options{panel['id']}: Json<Partial<{options}>> = {json.dumps(panel['options'])};\n"
            yield f"export const custom{panel['id']}: Json<Partial<{custom}>> = {json.dumps(config)};\n"


def check_dashboard_types():
    """Against the types that Grafana publishes; in JSON an enumeration is its text."""
    if not shutil.which("npm"):
        return "there is no npm"
    place = os.path.join(BUILD, "grafana-types")
    os.makedirs(place, exist_ok=True)
    with open(os.path.join(place, "package.json"), "w") as file:
        file.write('{"private": true}\n')
    try:
        run("npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries=0", "--fetch-timeout=20000",
            *TYPES, cwd=place, timeout=120)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        return f"npm cannot fetch Grafana's types: {str(error)[-200:]!r}"
    with open(os.path.join(place, "dashboard.ts"), "w") as file:
        file.writelines(typescript())
    run("node_modules/.bin/tsc", "--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--moduleResolution",
        "nodenext", "--target", "es2022", "dashboard.ts", cwd=place)
    return None


# ---- a live scrape ----


def samples(text):
    """(name, labels as written, number) of each line."""
    for line in text.splitlines():
        if not line.startswith("#"):
            series, number = line.rsplit(" ", 1)
            name, _, labels = series.partition("{")
            yield name, labels, float(number)


def check_promtool_metrics(url):
    words = run("promtool", "check", "metrics", input=fetch(url).encode())
    need(not words, words)


def check_openmetrics_parser(url):
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    text = fetch(url, Accept=OPENMETRICS, **{"Accept-Encoding": "gzip"})
    families = list(text_string_to_metric_families(text))
    need(len(families) > 40, f"only {len(families)} families")


def check_text_parser(url):
    from prometheus_client.parser import text_string_to_metric_families

    need(len(list(text_string_to_metric_families(fetch(url)))) > 40, "few families")


def check_duplicate_series(url):
    for accept in ("text/plain", OPENMETRICS):
        count = collections.Counter()
        for name, labels, _ in samples(fetch(url, Accept=accept)):
            count[name, tuple(sorted(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels)))] += 1
        need(max(count.values()) == 1, f"{count.most_common(1)} in {accept}")


def check_families(url):
    """HELP and TYPE once, before the samples, which stand together; counters alone end in _total."""
    seen, kind = set(), None
    for line in fetch(url).splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            need(name not in seen, f"{name} has two TYPEs")
            need(name.endswith("_total") == (kind == "counter"), f"{name} is a {kind}")
            seen.add(name)
            family = name
        elif not line.startswith("#"):
            name = re.match(r"\w+", line).group()
            need(name == family or (kind == "histogram" and name.startswith(family + "_")), f"{name} is under {family}")


def check_identities_under_load(url):
    """Exact in each scrape, because what is derived is derived from what is shown, but that no level is below zero."""
    for _ in range(100):
        of = {name[5:-6]: number for name, _, number in samples(fetch(url)) if re.fullmatch(r"vpmm_\w+_bytes", name)}
        need(of["mapped"] == of["live"] + of["reusable"] or (of["live"] > of["mapped"] and not of["reusable"]), str(of))
        need(of["reserved"] == of["mapped"] + of["hole"] + of["pending_unmap"] or not of["hole"], str(of))
        need(of["slab"] == of["slab_live"] + of["slab_free"] or (of["slab_live"] > of["slab"] and not of["slab_free"]), str(of))
        need(of["slab_cached"] <= of["slab"] <= of["live"], str(of))  # what else is live is far more than one moment's cut
        time.sleep(0.03)  # within the exporter's limit of requests a second


def check_tiers(url):
    """The tiers are those that are known, and the server's requests below a page are served by slabs."""
    tiers = {"mallocs": {"cache", "own_stream", "neighbour", "completed", "waited", "slab", "async", "build"},
             "frees": {"cache", "pages", "slab", "async"}}
    for sum_of, expected in tiers.items():
        counts = {re.search(r'tier="(\w+)"', labels).group(1): number
                  for name, labels, number in samples(fetch(url)) if name == f"vpmm_{sum_of}_total"}
        need(set(counts) == expected, f"{sum_of}: {sorted(counts)}")
        need(not counts["async"] and (counts["slab"] or sum_of == "frees"), f"{sum_of}: {counts}")  # caches hold many


# ---- Prometheus ----


class Prometheus:
    """A server of our own, on a free port and in a folder that goes with it."""

    def __init__(self, target):
        self.folder = tempfile.mkdtemp(prefix="vpmm-prometheus-")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        with open(os.path.join(PROMETHEUS, "prometheus.yml")) as file:
            text = file.read().replace("server:9435", target).replace("scrape_interval: 5s", "scrape_interval: 500ms")
        text += ("  - job_name: other  # Prometheus itself, which has `up` and process_* as well\n"
                 f"    static_configs:\n      - targets: ['127.0.0.1:{self.port}']\n")
        shutil.copy(os.path.join(PROMETHEUS, "vpmm.rules.yml"), self.folder)
        with open(os.path.join(self.folder, "prometheus.yml"), "w") as file:
            file.write(text)
        self.process = subprocess.Popen(
            ["prometheus", f"--config.file={self.folder}/prometheus.yml", f"--storage.tsdb.path={self.folder}/data",
             f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=warn"])

    def query(self, expr):
        text = fetch(f"http://127.0.0.1:{self.port}/api/v1/query?" + urllib.parse.urlencode({"query": expr}))
        answer = json.loads(text)
        need(answer["status"] == "success", text)
        return answer["data"]["result"]

    def close(self):
        self.process.terminate()
        self.process.wait(120)
        shutil.rmtree(self.folder)


def check_prometheus_scrapes(prometheus):
    up = prometheus.query('up{job="vpmm"}')
    need([sample["value"][1] for sample in up] == ["1"], str(up))
    scrapes = prometheus.query('count_over_time(vpmm_mapped_bytes[5s])')
    need(int(scrapes[0]["value"][1]) >= 5, str(scrapes))


def check_every_metric_has_a_sample(prometheus):
    with open(DASHBOARD) as dashboard, open(os.path.join(PROMETHEUS, "vpmm.rules.yml")) as rules:
        names = set(re.findall(r"\b(?:vpmm|process)_\w+|\bup\b", " ".join(expressions(json.load(dashboard)))))
        names |= set(re.findall(r"\b(?:vpmm|process)_\w+|\bup\b", " ".join(re.findall(r"expr: (.*)", rules.read()))))
    need(len(names) > 40, f"only {sorted(names)}")
    missing = [name for name in sorted(names) if not prometheus.query(name)]
    need(not missing, f"without a sample: {missing}")


def check_every_metric_is_on_the_dashboard(url):
    with open(DASHBOARD) as file:
        shown = " ".join(expressions(json.load(file)))
    exported = re.findall(r"^# TYPE (vpmm_\w+) ", fetch(url), re.MULTILINE)
    need(len(exported) > 40, f"only {exported}")
    missing = [name for name in exported if not re.search(rf"\b{name}(_bucket)?\b", shown)]
    need(not missing, f"in no panel: {missing}")


def with_values(expr, values):
    for variable, value in values.items():
        expr = expr.replace("$" + variable, value)
    return expr


def all_of_the_variables(prometheus, dashboard):
    """What Grafana puts in a variable's place where All is chosen: its allValue, or else what it lists, escaped."""
    values = {"__rate_interval": "5s", "__range": "8s"}
    for variable in dashboard["templating"]["list"][1:]:
        selector, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"]).groups()
        answer = prometheus.query(f"count by ({label}) ({with_values(selector, values)})")
        listed = [re.escape(sample["metric"][label]).replace("\\", "\\\\") for sample in answer]
        need(listed, f"{variable['name']} lists nothing")
        values[variable["name"]] = variable.get("allValue") or "(" + "|".join(listed) + ")"
    return values


def check_every_panel_shows_something(prometheus):
    with open(DASHBOARD) as file:
        dashboard = json.load(file)
    values = all_of_the_variables(prometheus, dashboard)
    empty, others = [], []
    for expr in expressions(dashboard):
        answer = prometheus.query(with_values(expr, values))
        if not answer:
            empty.append(expr)
        if any(sample["metric"].get("job", "vpmm") != "vpmm" for sample in answer):
            others.append(expr)
    need(not empty, f"no answer to {empty}")
    need(not others, f"another job's targets answer to {others}")
    up = prometheus.query(with_values('sum(up{job=~"$job",instance=~"$instance"})', values))
    need([sample["value"][1] for sample in up] == ["1"], str(up))


def check_identities_in_prometheus(prometheus):
    for zero in ("vpmm_reserved_bytes - vpmm_live_bytes - vpmm_reusable_bytes - vpmm_hole_bytes - vpmm_pending_unmap_bytes",
                 "vpmm_mapped_bytes + vpmm_parked_bytes - vpmm_live_bytes - vpmm_reusable_bytes",
                 "vpmm_slab_bytes - vpmm_slab_live_bytes - vpmm_slab_free_bytes"):
        answer = prometheus.query(f"max_over_time(abs({zero})[5s:500ms])")
        need([sample["value"][1] for sample in answer] == ["0"], f"{zero}: {answer}")


def check_bad_clients_keep_nobody_out(prometheus, url):
    """Half requests, bytes at random, TLS and long headers, from the very address of Prometheus, which goes on."""
    address = urllib.parse.urlparse(url)
    random_bytes = random.Random(1)
    bad = [b"GET /metrics HTTP/1.1\r\nHost: x\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"",
           b"GET / HTTP/1.1\r\nX: " + b"x" * 100000]
    held = collections.deque(maxlen=300)
    begin = time.monotonic()
    while time.monotonic() < begin + 3:
        held.append(socket.create_connection((address.hostname, address.port)))
        try:
            held[-1].send(random_bytes.choice(bad + [random_bytes.randbytes(200)]), socket.MSG_DONTWAIT)
        except OSError:
            pass  # it was closed already, which is as it should be
        time.sleep(0.002)
    up = prometheus.query('min_over_time(up{job="vpmm"}[3s])')
    need([sample["value"][1] for sample in up] == ["1"], str(up))
    fds = [number for name, _, number in samples(fetch(url)) if name == "process_open_fds"]
    need(fds[0] < 150, f"the server has {fds} descriptors open")
    for client in held:
        client.close()


def check_picture(prometheus):
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "there is no python3-matplotlib"
    picture = os.path.join(BUILD, "run.png")
    run(sys.executable, os.path.join(ROOT, "exporter", "grafana", "draw.py"), f"http://127.0.0.1:{prometheus.port}", "8",
        picture)
    need(os.path.getsize(picture) > 10000, "it is empty")
    return None


def check_no_alert_fires(prometheus):
    alerts = prometheus.query('ALERTS{alertstate="firing"}')
    need(not alerts, str(alerts))


# ---- all of it ----


def metrics_url(server):
    for line in server.stdout:
        found = re.match(r"metrics: port (\d+) of 127\.0\.0\.1", line)
        if found:
            return f"http://127.0.0.1:{found.group(1)}/metrics"
    raise AssertionError("the server does not say where its metrics are")


def check_server_is_well(server):
    server.terminate()
    rest = server.communicate(timeout=120)[0]
    need(server.returncode == 0 and "all good" in rest, f"it ends with {server.returncode}: {rest[-2000:]}")


def check_all(server):
    url = metrics_url(server)
    started = time.monotonic()
    prometheus = Prometheus(urllib.parse.urlparse(url).netloc)
    try:
        for name in ("rules", "alerts_fire_and_do_not", "scrape_configuration", "dashboard", "dashboard_types"):
            check(name)
        for name in ("promtool_metrics", "text_parser", "openmetrics_parser", "duplicate_series", "families",
                     "identities_under_load", "every_metric_is_on_the_dashboard"):
            check(name, url)
        check("tiers", url, patience=PATIENCE)
        time.sleep(max(0, started + LOADED - time.monotonic()))
        for name in ("prometheus_scrapes", "every_metric_has_a_sample", "every_panel_shows_something"):
            check(name, prometheus, patience=PATIENCE)
        for name in ("identities_in_prometheus", "no_alert_fires", "picture"):
            check(name, prometheus)
        check("bad_clients_keep_nobody_out", prometheus, url, patience=PATIENCE)
    finally:
        prometheus.close()
    check("server_is_well", server)


def main():
    server = subprocess.Popen([SERVER, "--driver", "sim", "--seconds", str(SECONDS), "--metrics-port", "0"],
                              stdout=subprocess.PIPE, text=True)
    try:
        check_all(server)
    finally:
        if server.poll() is None:
            server.kill()
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
