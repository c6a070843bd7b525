"""Evidence from the exporters themselves."""

from __future__ import annotations

import pytest
from tests.unit.reconciler.sources_bench import GOLDEN, NOW, PLACE, FakeApi, at_most_covered, page, read, stage_of

from gpu_exporter.common.address import Address
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.errors import AnswerError
from gpu_exporter.reconciler.decision.policy import decide
from gpu_exporter.reconciler.evidence.exporters import ExporterSource, parse_exporter
from gpu_exporter.reconciler.evidence.records import HolderName, Unseen


def test_evidence_from_exporters_contains_every_number_of_a_decision() -> None:
    assert stage_of(page(8000.0, 9000.0, 8900.0)) == ("underused", "ada/phys")
    assert stage_of(page(8000.0, 9000.0, 4000.0))[0] == "unknown"
    assert stage_of(page(8000.0, 9000.0, 8900.0, units=8))[0] == "unknown"  # seven of its GPUs are not seen
    assert stage_of(page(8000.0, 9000.0, 8900.0, NOW - 600))[0] == "unknown"
    assert stage_of(page(8000.0, 9000.0, 8900.0).replace("gpu_allocation_idle_run_seconds", "x"))[0] == "unknown"


def test_a_job_id_that_two_slurm_clusters_use_is_unknown_and_the_reason_names_both_clusters() -> None:
    """alpha's job has a third GPU on a node that does not answer. beta's only GPU must not count as this GPU."""

    def fetch(address: Address) -> str:
        cluster = "beta" if address.host == "b1" else "alpha"
        place = PLACE.replace("GPU-0", address.host)
        text = page(8000.0, 9000.0, 9000.0, units=1 if cluster == "beta" else 3).replace(PLACE, place)
        return text.replace("user=", f'slurm_cluster="{cluster}",user=')

    source = ExporterSource(
        [parse_exporter("a1:1"), parse_exporter("a2:1"), parse_exporter("b1:1")], 7200.0, ManualClock(wall=NOW), fetch
    )
    (decision,) = decide(source.read_evidence(), Policy())
    reason = "jobs of 2 Slurm clusters have this id: alpha, beta"
    assert (decision.stage, decision.reason, decision.cluster) == ("unknown", reason, "")
    (decision,) = decide(
        ExporterSource([parse_exporter("b1:1")], 7200.0, ManualClock(wall=NOW), fetch).read_evidence(), Policy()
    )
    assert (decision.stage, decision.cluster) == ("underused", "beta")
    api = FakeApi()
    for name, cluster in (("GPU-1", "alpha"), ("GPU-2", "beta")):
        api.more.setdefault("gpu_allocation_info", []).append(({"uuid": name, "slurm_cluster": cluster}, 1.0))
    (decision,) = decide(read(api), Policy())
    assert decision.reason == "jobs of 3 Slurm clusters have this id: a cluster without a name, alpha, beta"
    api = FakeApi()
    api.labels = {"slurm_cluster": "alpha"}
    (decision,) = decide(read(api), Policy())
    assert (decision.stage, decision.cluster) == ("underused", "alpha")


def test_jobs_that_slurm_hides_are_no_holders_and_their_gpus_are_counted() -> None:
    """Hidden jobs have no id. Two of them, each idle on one GPU, would look like one job."""

    def hidden(uuid: str) -> str:
        place = f'gpu="0",uuid="{uuid}",scheduler="slurm",job_id=""'
        labels = f'{place},slurm_cluster="lab",identity="hidden"'
        return page(8000.0, 9000.0, 8900.0).replace(f"info{{{PLACE}", f"info{{{labels}").replace(PLACE, place)

    texts = {"n1:1": hidden("GPU-1"), "n2:1": hidden("GPU-2"), "n2:2": hidden("GPU-2"), "n3:1": page(8e3, 9e3, 9e3)}
    source = ExporterSource(
        list(map(parse_exporter, texts)), 7200.0, ManualClock(wall=NOW), lambda page: texts[page.place]
    )
    evidence = source.read_evidence()
    assert [str(holder.name) for holder in evidence.holders] == ["job 42"]
    assert (evidence.hidden, evidence.allocations) == (2, 4)
    texts["n1:1"] = "\n".join(line for line in hidden("GPU-1").splitlines() if "_info" not in line) + "\n"
    assert source.read_evidence().hidden == 2  # without its info series the job has no id either
    api = FakeApi()
    nameless = {"job_id": "", "uuid": "GPU-1"}
    api.more["gpu_allocation_idle_run_seconds"] = [(nameless, 8000.0)]
    api.more["gpu_allocation_info"] = [({**nameless, "identity": "hidden"}, 1.0)]
    api.values["count(count by (uuid, mig_uuid)"] = 3.0
    evidence = read(api)
    assert [str(holder.name) for holder in evidence.holders] == ["job 42"]
    assert evidence.hidden == 3
    assert 'count(count by (uuid, mig_uuid) (gpu_allocation_info{identity="hidden"}))' in api.queries
    api = FakeApi()
    api.values |= {
        "gpu_allocation_idle_run_seconds": None,
        "count(count by (uuid, mig_uuid)": 3.0,
    }
    assert (read(api).holders, read(api).hidden) == ((), 3)


def test_coverage_from_an_exporter_that_flaps_is_the_share_of_its_uptime() -> None:
    assert at_most_covered(70, 50) < 0.65
    assert at_most_covered(120, 0) == 1.0


def test_samples_are_kept_while_an_exporter_does_not_answer_and_dropped_when_a_holder_is_gone() -> None:
    texts, clock = {"http://n1/metrics": page(8000.0, 90_000.0, 80_000.0)}, ManualClock(wall=NOW)

    def fetch(address: Address) -> str:
        if not texts.get(str(address)):
            raise AnswerError(f"{address}: connection refused")
        return texts[str(address)]

    other = "gpu_exporter_build_info 1\n"
    source = ExporterSource(
        [parse_exporter("http://n1/metrics"), parse_exporter("http://n2/metrics")], 7200.0, clock, fetch
    )
    texts["http://n2/metrics"] = other
    assert source.read_evidence().holders[0].units[0].coverage == 0.0
    texts["http://n1/metrics"] = ""
    clock.advance(3600.0)
    source.read_evidence()
    texts["http://n1/metrics"] = page(8000.0, 93_600.0, 83_600.0)
    assert source.read_evidence().holders[0].units[0].coverage == 0.5  # the last hour of the window was observed
    texts["http://n1/metrics"] = other
    source.read_evidence()
    texts["http://n1/metrics"] = page(8000.0, 93_600.0, 83_600.0)
    assert source.read_evidence().holders[0].units[0].coverage == 0.0


@pytest.mark.parametrize("first", [1, 4])
def test_if_a_page_has_two_rows_for_one_allocation_the_smaller_count_of_witnesses_counts(first: int) -> None:
    """The two rows differ in a label for people, such as the index of the GPU."""
    text = page(8000.0, 9000.0, 8900.0, witnesses=first)
    elsewhere = PLACE.replace('gpu="0"', 'gpu="9"')
    text += f"gpu_allocation_idle_run_witnesses{{{elsewhere}}} {5 - first}\n"
    assert stage_of(text)[0] == "candidate"
    assert stage_of(page(8000.0, 9000.0, 8900.0, witnesses=2))[0] == "underused"
    without = page(8000.0, 9000.0, 8900.0).replace("gpu_allocation_idle_run_witnesses", "x")
    assert stage_of(without)[0] == "candidate"


def test_the_demo_page_is_parsed_as_evidence() -> None:
    source = ExporterSource(
        [parse_exporter("http://n1/metrics")], 7200.0, ManualClock(wall=NOW), lambda _url: GOLDEN.read_text("utf-8")
    )
    evidence = source.read_evidence()
    names = {str(holder.name): holder for holder in evidence.holders}
    assert len(names) == 10
    assert [bool(unit.stalled_run_s) for unit in names["job 48077"].units] == [True, False]
    assert names["job 48113"].owner == "mira/phys"
    (unit,) = names["serving/embedder-1"].units
    assert unit.mig == "2/0"
    assert unit.witnesses == 5


def test_a_page_that_contains_no_metrics_is_an_error() -> None:
    source = ExporterSource(
        [parse_exporter("http://n1/metrics")], 7200.0, ManualClock(wall=NOW), lambda _url: "<html>login</html>"
    )
    with pytest.raises(AnswerError, match="http://n1/metrics: the answer is not in the Prometheus text format"):
        source.read_evidence()


def test_too_many_exporters_are_refused() -> None:
    with pytest.raises(ValueError, match="201 exporters exceed the limit of 200: use --source.prometheus"):
        ExporterSource([parse_exporter("http://n/")] * 201, 1.0, ManualClock(wall=NOW))


def test_a_silent_exporter_is_remembered_for_an_hour_with_the_holders_that_no_other_shows() -> None:
    pod = 'uuid="GPU-7",scheduler="kubernetes",namespace="ml",pod="a",container="c"'
    texts = {
        "n1:1": page(8e3, 9e3, 9e3) + f'gpu_allocation_info{{{pod},pod_uid="uid",source="kubelet"}} 1\n',
        "n2:1": page(8e3, 9e3, 9e3).replace('job_id="42"', 'job_id="42",identity="hidden"').replace("GPU-0", "GPU-1"),
        "n3:1": "gpu_exporter_build_info 1\n",
    }
    clock = ManualClock(wall=NOW)

    def fetch(address: Address) -> str:
        if not texts[address.place]:
            raise AnswerError(f"{address}: connection refused")
        return texts[address.place]

    source = ExporterSource(list(map(parse_exporter, texts)), 7200.0, clock, fetch)
    assert source.read_evidence().unseen == ()
    first, texts["n1:1"], texts["n2:1"] = texts["n1:1"], "", ""
    job, other = (
        Unseen("n1:1", HolderName("slurm", "", "42"), f"{NOW - 9000:.0f}"),
        Unseen("n1:1", HolderName("kubernetes", "ml", "a"), "uid"),
    )
    assert set(source.read_evidence().unseen) == {job, other}
    texts["n3:1"] = page(8e3, 9e3, 9e3)  # the node has another exporter now
    assert source.read_evidence().unseen == (other,)
    clock.advance(3600.0)
    assert source.read_evidence().unseen == (other,)
    clock.advance(1.0)
    assert source.read_evidence().unseen == ()
    texts["n1:1"] = first
    assert source.read_evidence().unseen == ()
