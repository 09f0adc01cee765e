"""Whoever speaks of metrics speaks of those that there are: the page for people, the dashboard, the alerts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jitney.metrics.table import ALL, OF_API, OF_QUEUE, OF_WORKER, QUEUE_LABELS, WORKER_LABELS, Metric

ROOT = Path(__file__).parent.parent
OPS = ROOT / "ops"
SUFFIXES = re.compile(r"_(bucket|sum|count)$")
FUNCTIONS = {"sum", "max", "by", "rate", "delta", "histogram_quantile", "unless"}
OF_PROMETHEUS = {"up"}


def test_metrics_of_the_page_are_those_of_the_table_in_its_order() -> None:
    page = (ROOT / "docs" / "METRICS.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| `jit")]
    table = [
        [f"`{metric.name}`", metric.kind, ", ".join(f"`{label}`" for label in metric.labels) or "–", metric.help]
        for metric in (*OF_WORKER, *OF_QUEUE, *OF_API)
    ]
    assert [row for row in rows if len(row) == 4] == table


def test_metrics_have_names_and_labels_as_prometheus_wants_them() -> None:
    assert len(ALL) == len(OF_WORKER) + len(OF_QUEUE) + len(OF_API)
    for metric in ALL.values():
        assert re.fullmatch(r"jitney_[a-z0-9_]+", metric.name)
        assert (metric.kind == "counter") <= metric.name.endswith("_total")
        assert (metric.kind == "histogram") == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert not {"tenant", "job", "job_id", "key", "le"} & set(metric.labels), "their number has no bound"
        assert metric.help.endswith(".")


def test_metrics_that_vllm_has_keep_its_names() -> None:
    """What its dashboards and autoscaling rules ask for, with our prefix."""
    theirs = {
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
        *("prefix_cache_queries_total", "prefix_cache_hits_total", "prompt_tokens_total", "generation_tokens_total"),
        *("request_success_total", "iteration_tokens_total", "time_to_first_token_seconds"),
        *("inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"),
        *("request_prefill_time_seconds", "request_decode_time_seconds", "request_inference_time_seconds"),
        *("request_prompt_tokens", "request_generation_tokens"),
    }
    assert {f"jitney_{name}" for name in theirs} <= ALL.keys()


def labels_of(metric: Metric) -> set[str]:
    shared = WORKER_LABELS if metric in OF_WORKER else QUEUE_LABELS if metric in OF_QUEUE else ()
    return {*shared, *metric.labels, "instance", "job"}


def check_expression(expression: str) -> set[str]:
    """The metrics that it asks for. Not PromQL's grammar, but every name in it, and how it is used."""
    assert expression.count("(") == expression.count(")")
    assert expression.count("{") == expression.count("}")
    plain = re.sub(r'"[^"]*"', '""', expression)
    named = set()
    for match in re.finditer(r"\b(jitney_[a-z0-9_]+)(\{[^}]*\})?(\[[^]]+\])?", plain):
        name, matchers, window = match[1], match[2] or "{}", match[3]
        base = SUFFIXES.sub("", name) if name not in ALL else name
        assert base in ALL, f"{name} in {expression}"
        metric = ALL[base]
        named.add(base)
        assert (metric.kind == "histogram") == (base != name), f"{name} in {expression}"
        assert set(re.findall(r"(\w+)\s*[=!]~?", matchers)) <= labels_of(metric), f"labels of {name}"
        before = plain[: match.start()]
        assert bool(window) == before.endswith(("rate(", "delta("))
        if before.endswith("rate("):
            assert metric.kind != "gauge", f"rate of a gauge: {name}"
        elif before.endswith("delta("):
            assert metric.kind == "gauge", f"delta of a counter: {name}"
        else:
            assert metric.kind == "gauge", f"a counter by itself says nothing: {name}"
    grouped = {label for group in re.findall(r"by \(([^)]*)\)", plain) for label in re.split(r",\s*", group)}
    assert grouped <= {"le"}.union(*(labels_of(ALL[name]) for name in named))
    assert ("histogram_quantile(" in plain) == ("_bucket" in plain)
    words = set(re.findall(r"[a-z_]+(?=\s*\()", plain)) | set(re.findall(r"\bunless\b", plain))
    assert words <= FUNCTIONS | named
    return named


def expressions_of_the_dashboard() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]


def dashboard() -> Any:
    return json.loads((OPS / "grafana" / "dashboards" / "jitney.json").read_text())


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((OPS / "prometheus" / "alerts.yml").read_text())["groups"]
    rules: list[dict[str, Any]] = group["rules"]
    return rules


def test_metrics_of_the_dashboard_exist_and_are_used_as_what_they_are() -> None:
    asked = set().union(*map(check_expression, expressions_of_the_dashboard()))
    assert len(asked) > 25
    assert asked >= {
        *("jitney_time_to_first_token_seconds", "jitney_inter_token_latency_seconds", "jitney_num_preemptions_total"),
        *("jitney_queue_lag", "jitney_kv_cache_usage_perc", "jitney_leases_reclaimed_total"),
    }


def test_metrics_dashboard_is_laid_out_on_grafanas_grid_and_finds_its_datasource() -> None:
    board, sources = dashboard(), yaml.safe_load((OPS / "grafana/provisioning/datasources/prometheus.yml").read_text())
    (source,) = sources["datasources"]
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, f"{panel['title']} lies on another panel"
        assert max(x for x, _ in cells) < 24
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"] == {"type": source["type"], "uid": source["uid"]}
            assert {target["datasource"]["uid"] for target in panel["targets"]} == {source["uid"]}
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    (queue,) = board["templating"]["list"]
    assert queue["query"]["query"] == "label_values(jitney_queue_tokens, queue)"


def test_metrics_of_the_alerts_exist_and_each_waits_for_a_restart_to_be_over() -> None:
    rules = alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 10
    for rule in rules:
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}, rule["alert"]
        assert check_expression(rule["expr"]) or "up{" in rule["expr"]
        number, unit = re.fullmatch(r"(\d+)([smh])", rule["for"]).groups()  # type: ignore[union-attr]
        assert int(number) * {"s": 1, "m": 60, "h": 3600}[unit] >= 60
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "description"}
        spoken = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["description"]))
        given = set(re.findall(r"by \(([^)]*)\)", rule["expr"])[-1:]) or {"queue", "instance"}
        assert spoken <= {label for group in given for label in group.split(", ")} | given


@pytest.mark.parametrize(
    "wrong",
    [
        "jitney_queue_lagg",
        "sum(rate(jitney_queue_lag[5m]))",
        "jitney_generation_tokens_total",
        "rate(jitney_generation_tokens_total)",
        'jitney_queue_lag{tenant="a"}',
        "sum by (tenant) (jitney_queue_lag)",
        "histogram_quantile(0.9, rate(jitney_step_seconds[5m]))",
        "summe(jitney_queue_lag)",
        "sum(jitney_queue_lag",
    ],
)
def test_metrics_check_refuses_slips(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check_expression(wrong)


def test_metrics_are_scraped_where_compose_serves_them() -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    config = yaml.safe_load((OPS / "prometheus" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert services[host]["command"][-2:] == ["--port", port]
    assert [(OPS / "prometheus" / name).is_file() for name in config["rule_files"]] == [True]
    (source,) = yaml.safe_load((OPS / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    mounted = [volume.split(":") for name in ("prometheus", "grafana") for volume in services[name]["volumes"]]
    assert all((ROOT / where).is_dir() for where, *_ in mounted if where.startswith("./"))
    (provider,) = yaml.safe_load((OPS / "grafana/provisioning/dashboards/jitney.yml").read_text())["providers"]
    assert provider["options"]["path"] in {inside for _, inside, *_ in mounted}
