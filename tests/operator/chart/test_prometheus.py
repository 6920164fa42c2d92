"""A real Prometheus scrapes what an operator shows, evaluates every rule, and answers every panel of the dashboard."""

from __future__ import annotations

import http.server
import json
import os
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest
import yaml
from rendering import EVERYTHING, NAMESPACE, only, render, with_helm
from test_chart_metrics import dashboard_expressions, exposition

from ports import free_port

PROGRAM = os.environ.get("PROMETHEUS") or shutil.which("prometheus")
PATIENCE = 60.0

pytestmark = [
    with_helm,
    pytest.mark.skipif(PROGRAM is None, reason="needs prometheus: put it on the PATH, or name it by PROMETHEUS"),
]

BEGAN = time.monotonic()
MAY_BE_EMPTY = ("> 0", "< 0", 'code!~"2.."')
"""Panels of what is wrong show nothing while all is well."""
VARIABLES = {"$__rate_interval": "1m", "$namespace": ".*", "$job": ".*"}
"""What Grafana puts in their place."""


def resolved(expression: str) -> str:
    """The query of a panel as Grafana sends it."""
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


class Operator(http.server.BaseHTTPRequestHandler):
    """Shows what an operator would whose job has two workers and a goodput of a quarter."""

    def do_GET(self) -> None:
        body = exposition(2 * (time.monotonic() - BEGAN)).encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A Prometheus with the chart's rules, which scrapes an operator: what its API answers."""
    operator = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Operator)
    serving = threading.Thread(target=operator.serve_forever, daemon=True)
    serving.start()
    port = free_port()
    rules = only(render({**EVERYTHING, "jobs": {"metrics": True}}), "PrometheusRule")["spec"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rules))
    target = {"targets": [f"127.0.0.1:{operator.server_port}"], "labels": {"namespace": NAMESPACE}}
    config = {
        "global": {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "200ms"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": "operator", "static_configs": [target]}],
    }
    (tmp_path / "prometheus.yaml").write_text(yaml.safe_dump(config))
    assert PROGRAM is not None
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [
                PROGRAM,
                f"--config.file={tmp_path / 'prometheus.yaml'}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )

    def answer(path: str, **parameters: str) -> Any:
        url = f"http://127.0.0.1:{port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=PATIENCE) as got:
                return json.load(got)["data"]
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.SERVICE_UNAVAILABLE:  # it starts
                return None
            raise AssertionError(f"{parameters}: {error.read().decode()}") from error
        except urllib.error.URLError:
            assert process.poll() is None, (tmp_path / "log").read_text()
            return None

    yield answer
    process.terminate()
    process.wait(PATIENCE)
    operator.shutdown()
    serving.join(PATIENCE)
    operator.server_close()


def wait_for(condition: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def test_a_real_prometheus_evaluates_every_rule_and_has_data_for_every_panel(ask: Callable[..., Any]) -> None:
    def scraped_twice() -> Any:
        counted = ask("query", query="count_over_time(up[1m])")
        return counted and counted["result"] and float(counted["result"][0]["value"][1]) >= 2

    wait_for(scraped_twice)

    def evaluated() -> Any:
        (group,) = ask("rules")["groups"]
        return group["rules"] if all(rule["health"] != "unknown" for rule in group["rules"]) else None

    rules = wait_for(evaluated)
    assert [rule["lastError"] for rule in rules if rule["health"] != "ok"] == []
    assert len(rules) > 10
    empty = []
    for expression in dashboard_expressions():
        if expression.startswith("label_values("):
            continue  # Grafana's own: a list of what there is to choose from
        found = ask("query", query=resolved(expression))["result"]
        if not found and not any(words in expression for words in MAY_BE_EMPTY):
            empty.append(expression)
    assert empty == []
    (goodput,) = [expression for expression in dashboard_expressions() if "committed" in expression]
    (job,) = ask("query", query=resolved(goodput))["result"]
    assert float(job["value"][1]) == pytest.approx(0.25, abs=0.001)
