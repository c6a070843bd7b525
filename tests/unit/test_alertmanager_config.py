"""The Prometheus operator's form of the Alertmanager configuration says the same as the original."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from tools.alertmanager_config import FOLDER, build_page, render

ORIGINAL = yaml.safe_load((FOLDER / "alertmanager.yaml").read_text("utf-8"))
SPEC = yaml.safe_load(next(iter(build_page().values())))["spec"]


def written(matchers: list[dict[str, str]]) -> list[str]:
    return [f'{each["name"]}{each["matchType"]}"{each["value"]}"' for each in matchers]


def test_each_route_inhibition_interval_and_receiver_is_there_in_the_same_order() -> None:
    routes = ORIGINAL["route"]["routes"]
    assert [written(each["matchers"]) for each in SPEC["route"]["routes"]] == [each["matchers"] for each in routes]
    for key, camel in (("receiver", "receiver"), ("repeat_interval", "repeatInterval"), ("group_by", "groupBy")):
        assert [each.get(camel) for each in SPEC["route"]["routes"]] == [each.get(key) for each in routes]
    assert [written(each["sourceMatch"]) for each in SPEC["inhibitRules"]] == [
        each["source_matchers"] for each in ORIGINAL["inhibit_rules"]
    ]
    assert [written(each["targetMatch"]) for each in SPEC["inhibitRules"]] == [
        each["target_matchers"] for each in ORIGINAL["inhibit_rules"]
    ]
    assert [each["equal"] for each in SPEC["inhibitRules"]] == [each["equal"] for each in ORIGINAL["inhibit_rules"]]
    assert [each["name"] for each in SPEC["receivers"]] == [each["name"] for each in ORIGINAL["receivers"]]
    assert SPEC["muteTimeIntervals"] == [
        {
            "name": "office-hours",
            "timeIntervals": [
                {"weekdays": ["monday:friday"], "times": [{"startTime": "08:00", "endTime": "18:00"}]},
            ],
        }
    ]


def test_a_mail_keeps_its_templates_and_headers() -> None:
    mails = {each["name"]: each["email_configs"][0] for each in ORIGINAL["receivers"] if "email_configs" in each}
    for receiver in SPEC["receivers"]:
        if "emailConfigs" not in receiver:
            continue
        (mail,), original = receiver["emailConfigs"], mails.pop(receiver["name"])
        assert {each["key"]: each["value"] for each in mail["headers"]} == original["headers"]
        assert [mail[key] for key in ("to", "text", "html")] == [original[key] for key in ("to", "text", "html")]
        assert mail.get("sendResolved") == original.get("send_resolved")
    assert mails == {}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda config: config["route"]["routes"][0].update(matchers=["audience=owner"]),
            "'audience=owner' cannot be read",
        ),
        (lambda config: config["receivers"][1].update(slack_configs=[]), "the receiver gpu-owners has slack_configs"),
        (lambda config: config["receivers"][1]["email_configs"][0].update(tls_config={}), "has tls_config"),
        (
            lambda config: config["time_intervals"][0]["time_intervals"][0].update(location="UTC"),
            "the time interval office-hours has location",
        ),
        (lambda config: config["inhibit_rules"][0].update(source_match={"a": "b"}), "an inhibition has source_match"),
        (lambda config: config["route"]["routes"][1].update(match_re={}), "the route to gpu-owners has match_re"),
        (lambda config: config.update(mute_time_intervals=[]), "the file has mute_time_intervals"),
    ],
)
def test_what_the_conversion_does_not_know_is_refused(change: Any, text: str) -> None:
    config = yaml.safe_load((FOLDER / "alertmanager.yaml").read_text("utf-8"))
    change(config)
    with pytest.raises(ValueError) as caught:
        render(yaml.safe_dump(config))
    assert text in str(caught.value)
