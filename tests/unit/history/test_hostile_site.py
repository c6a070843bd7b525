"""A report from a server whose answers are PromQL answers with any numbers and any labels: a report, or an error."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Collection, Mapping

from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_exporter.common.address import Address, parse_address
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reports.history.asking import History, WindowSpan
from gpu_exporter.reports.usage.gather import Gatherer
from gpu_exporter.reports.usage.prices import Prices
from gpu_exporter.reports.usage.render.forms import FORMS
from gpu_exporter.reports.usage.render.view import ReportView
from gpu_exporter.reports.usage.site import NAMES, find_site

HOUR = 3600.0
SPAN = WindowSpan(480_000 * HOUR, 480_004 * HOUR, HOUR)
TEXTS = (
    *(
        "",
        "a",
        "GPU-0",
        "GPU-01234567-89ab",
        "n1",
        "1g.5gb",
        "7",
        "0",
        "-1",
        "H100",
        "ml",
        "train-0-5d4f8c7b9",
        "x" * 300,
    ),
    *("a\0b", "\u202e", '"', "\\", "\n", "{}", "=~", "%", "{0}", "<script>", "日本", "🙂"),
)
LABELS = (
    *("cluster", "job", "instance", "UUID", "uuid", "GPU_I_ID", "GPU_I_PROFILE", "modelName", "Hostname", "hpc_job"),
    *("namespace", "pod", "exported_namespace", "exported_pod", "node", "jobid", "userid", "name", "owner_kind"),
    *("owner_name", "label_team", "currency", "odd"),
)
NUMBERS = (
    "0",
    "1",
    "0.0005",
    "0.5",
    "100",
    "120",
    "3600",
    "7200",
    "-1",
    "1e300",
    "-1e300",
    "1e-300",
    "NaN",
    "+Inf",
    "2.5",
)


class Site:
    """Answers each query with its own random series, the same ones for the same query. Half of its labels are usual."""

    def __init__(self, seed: int, wildness: float) -> None:
        self.seed, self.wildness = seed, wildness

    def __call__(self, address: Address, form: Mapping[str, str] | None, most_bytes: int, within_s: float) -> str:
        assert form is not None
        query, start, end, step = (form[name] for name in ("query", "start", "end", "step"))
        query.encode()  # it can be sent
        chance = random.Random(f"{self.seed} {query} {start}")
        series = []
        for number in range(chance.randrange(5)):
            labels = {"job": "dcgm", "UUID": f"GPU-{number}", "uuid": f"GPU-{number}", "Hostname": "n1", "node": "n1"}
            labels |= {"pod": f"p{number}", "namespace": "ml"}
            if query.startswith("count by (__name__)"):
                labels = {"__name__": chance.choice([*NAMES, "kube_pod_container_resource_requests", "odd"])}
            for name in LABELS:
                if chance.random() < self.wildness:
                    labels[name] = chance.choice(TEXTS)
            count = round((float(end) - float(start)) / float(step)) + 1
            values = [
                [
                    float(start) + n * float(step),
                    chance.choice(NUMBERS) if chance.random() < 2 * self.wildness else "120",
                ]
                for n in range(count)
                if chance.random() < 0.9
            ]
            series.append({"metric": labels, "values": values})
        return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": series}})


class Watch:
    def begin(self, days: Collection[WindowSpan], series: int, new: float) -> None: ...
    def end_chunk(self) -> None: ...


@settings(max_examples=40)
@given(st.integers(0, 10**9), st.sampled_from([0.0, 0.1, 0.5]))
def test_any_numbers_and_labels_give_a_report_or_an_error(seed: int, wildness: float) -> None:
    history = History(parse_address("http://127.0.0.1:9090"), Site(seed, wildness))
    gatherer = Gatherer(history, "", Prices({("", ""): 2.0}), 0.001, "label_team", Watch())
    try:
        site = find_site(history, "", SPAN)
        report = gatherer.read(site, SPAN)
    except AnswerError:
        return
    for render in FORMS.values():
        render(report, ReportView("namespace", 10)).encode("utf-8", "strict")
    text = FORMS["text"](report, ReportView("namespace", 10))
    assert not re.search("[\0\u202e\x1b]", text)
