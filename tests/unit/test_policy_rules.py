"""The ordered policies of a configuration file: every fault has its line, and printed policies can be read back."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gpu_exporter.common.config.defaults import Policy
from gpu_exporter.common.config.load import ConfigError, load_config, render_config
from gpu_exporter.common.config.rules import CHANGES, CLASSES, LISTS, Match, PolicyRule

ROOT = Path(__file__).resolve().parents[2]
FULL = """\
policies:
- name: lab
  match:
    namespaces: [lab-*, ml]
    labels: {team: "vis*"}
    owner_kinds: [PyTorchJob, batch/Job]
    classes: [batch, unclear]
    models: ["*A100*"]
    mig: false
  candidate_after: 30m
  underused_after: 45m
  startup_grace: 10m
  coverage_min: 0.95
  new_marks_max: 2
- name: night
  match: {partitions: [debug], accounts: [phys*], qos: [low], users: [ada], job_names: [jupyter*], reservations: [c-1]}
  interactive_after: 8h
  ceiling: candidate
- name: others
  exempt: "on trial: nothing is marked yet"
"""


def rules_of(text: str, tmp_path: Path) -> tuple[PolicyRule, ...]:
    path = tmp_path / "c.yaml"
    path.write_text(text, "utf-8")
    return load_config(path).rules


def test_each_key_of_a_policy_is_read(tmp_path: Path) -> None:
    lab, night, others = rules_of(FULL, tmp_path)
    assert lab.match == Match(
        ("lab-*", "ml"),
        (("team", "vis*"),),
        ("PyTorchJob", "batch/Job"),
        ("batch", "unclear"),
        ("*A100*",),
        False,
    )
    over = lab.over(Policy())
    assert (over.candidate_after, over.underused_after, over.startup_grace) == (1800.0, 2700.0, 600.0)
    assert (over.coverage_min, over.new_marks_max, over.interactive_after) == (0.95, 2, Policy().interactive_after)
    assert night.match == Match(
        partitions=("debug",),
        accounts=("phys*",),
        qos=("low",),
        users=("ada",),
        job_names=("jupyter*",),
        reservations=("c-1",),
    )
    assert (night.ceiling, night.over(Policy()).interactive_after) == ("candidate", 8 * 3600.0)
    assert (others.match, others.exempt) == (Match(), "on trial: nothing is marked yet")


def test_printed_policies_are_read_back_and_match_the_published_schema(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(FULL, "utf-8")
    config = load_config(path)
    text = render_config(config)
    path.write_text(text, "utf-8")
    assert load_config(path) == config
    schema = json.loads((ROOT / "docs" / "config.schema.json").read_text("utf-8"))
    jsonschema.validate(yaml.safe_load(FULL), schema)
    jsonschema.validate(yaml.safe_load(text), schema)
    for wrong in ("policies: [{name: A}]", "policies: [{name: a, march: {}}]", "policies: [{match: {mig: true}}]"):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(yaml.safe_load(wrong), schema)


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("policies: {}", ["c.yaml:1: policies: expected a list"]),
        ("policies:\n- a", ["c.yaml:2: policies[0]: expected keys below it"]),
        ("policies:\n- ceiling: candidate", ["c.yaml:2: policies[0]: has no name"]),
        (
            "policies:\n- name: Lab",
            ["c.yaml:2: policies[0].name: 'Lab' is not lower-case letters, digits and dashes, 63 at most"],
        ),
        (
            "policies:\n- name: a\n  macth: {}",
            [
                "c.yaml:3: policies[0].macth: unknown key, did you mean match?",
            ],
        ),
        (
            "policies:\n- name: a\n  match: {partition: [x], classes: [bach], mig: 1, namespaces: []}",
            [
                "c.yaml:3: policies[0].match.partition: unknown key, did you mean partitions?",
                "c.yaml:3: policies[0].match.classes: 'bach' is not one of serving, interactive, batch, unclear",
                "c.yaml:3: policies[0].match.mig: '1' is not true or false",
                "c.yaml:3: policies[0].match.namespaces: is empty, so it matches nothing; omit it to match all",
            ],
        ),
        (
            "policies:\n- name: a\n  candidate_after: 3h\n",
            ["c.yaml:2: policies[0]: candidate_after (3h) must not be above underused_after (2h)"],
        ),
        (
            "policy: {underused_after: 90m}\npolicies:\n- name: a\n  candidate_after: 100m\n",
            ["c.yaml:3: policies[0]: candidate_after (100m) must not be above underused_after (90m)"],
        ),
        (
            "policies:\n- name: a\n  coverage_min: 90\n  candidate_after: soon\n  name: b\n",
            [
                "c.yaml:5: policies[0].name: given twice",
                "c.yaml:3: policies[0].coverage_min: 90 is not a share between 0 and 1",
                "c.yaml:4: policies[0].candidate_after: 'soon' is not a duration with its unit, e.g. 90s",
            ],
        ),
        (
            "policies:\n- name: a\n  match: {labels: {a: b}, users: [ada]}\n",
            [
                "c.yaml:2: policies[0]: matches nothing: pods have namespaces, owner_kinds, labels, jobs partitions, "
                "accounts, qos, users, job_names, reservations"
            ],
        ),
        (
            "policies:\n- name: a\n  exempt: trial\n  ceiling: candidate\n",
            ["c.yaml:2: policies[0]: exempt holders are not judged, so the other keys have no effect"],
        ),
        (
            "policies:\n- name: a\n- name: a\n  match: {mig: true}\n",
            [
                "c.yaml:3: policies[1]: the name a is given twice",
                "c.yaml:3: policies[1]: is never reached, because a before it matches all holders",
            ],
        ),
        (
            "policies:\n- name: policy\n",
            ["c.yaml:2: policies[0]: the name policy is reserved: it means the section"],
        ),
        ("policies: []\npolicies: []", ["c.yaml:2: policies: given twice"]),
        ("policy: {}\npolicy: {}", ["c.yaml:2: policy: given twice"]),
        (
            "policy:\n  candidat_after: 1h\npolicies:\n- name: 'a b'\n",
            [
                "c.yaml:2: policy.candidat_after: unknown key, did you mean candidate_after?",
                "c.yaml:4: policies[0].name: 'a b' is not lower-case letters, digits and dashes, 63 at most",
            ],
        ),
    ],
)
def test_every_fault_of_a_policy_is_reported_with_its_line(tmp_path: Path, text: str, faults: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        rules_of(text, tmp_path)
    assert str(error.value).splitlines() == [f"{tmp_path / 'c.yaml'}{fault.removeprefix('c.yaml')}" for fault in faults]


def test_the_example_in_the_docs_is_a_valid_configuration(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "reconciler.md").read_text("utf-8")
    rules = rules_of(text.partition("```yaml\npolicies:")[2].partition("```")[0].join(["policies:", ""]), tmp_path)
    assert [rule.name for rule in rules] == [
        "teaching",
        "courses",
        "notebooks",
        "expensive",
        "debug",
        "others-are-only-warned",
    ]


def test_too_many_policies_are_refused(tmp_path: Path) -> None:
    many = [{"name": f"p{i}", "match": {"mig": True}} for i in range(201)]
    with pytest.raises(ConfigError, match=r"policies\[200\]: more than 200 policies"):
        rules_of(yaml.safe_dump({"policies": many}), tmp_path)


scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5))
keys = st.sampled_from(["name", "match", "ceiling", "exempt", *CHANGES, *LISTS, "labels", "mig", "<<"])
trees = st.recursive(
    scalars | st.sampled_from(["a", "1h", *CLASSES]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(keys, trees, max_size=5), max_size=3))
def test_any_policies_are_read_or_refused_with_a_reason(tmp_path_factory: pytest.TempPathFactory, tree: object) -> None:
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump({"policies": tree}), "utf-8")
    try:
        config = load_config(path)
    except ConfigError as exc:
        assert all(line.startswith(str(path)) for line in str(exc).splitlines())
        return
    path.write_text(render_config(config), "utf-8")
    assert load_config(path) == config
