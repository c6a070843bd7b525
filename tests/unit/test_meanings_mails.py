"""The sentences of causes in mails: for each cause, the templates print what the table of meanings says."""

from __future__ import annotations

import re

import pytest
from tools.meanings import PATH, build_page

from gpu_exporter.common.model.meanings import CAUSES, QUANTITY, sentence

TEXT = build_page()[PATH]
BRANCH = re.compile(
    r'(?:else )?if match "(?P<match>[^"]*)" \. }}(?:{{ reReplaceAll "(?P<pattern>[^"]*)" "(?P<by>[^"]*)" \. }}|(?P<plain>[^{]*))'
)


def print_template(name: str, annotation: str) -> str:
    """What a template prints for an annotation, by the few functions of Alertmanager that these templates use."""
    found = re.search(rf'{{{{ define "{name}" }}}}(.*){{{{ end }}}}{{{{ end }}}}', TEXT)
    assert found is not None
    for branch in BRANCH.finditer(found[1]):
        if re.search(branch["match"], annotation):
            if branch["pattern"] is None:
                return branch["plain"]
            return re.sub(
                branch["pattern"], branch["by"].replace("$", "\\").replace("\\{", "\\g<").replace("}", ">"), annotation
            )
    return ""


@pytest.mark.parametrize("name", CAUSES)
def test_a_mail_has_the_sentence_and_the_advice_with_their_numbers(name: str) -> None:
    meaning = CAUSES[name]
    values = {quantity: f"{number}7" for number, quantity in enumerate(meaning.quantities)}
    numbers = "".join(f" {quantity}={values[quantity]}" for quantity in sorted(values))
    for confidence in ("high", "medium"):
        annotation = f"{name} ({confidence} confidence){numbers}"

        def filled(text: str) -> str:
            return sentence(QUANTITY.sub(lambda match: values[match[1]], text))

        assert print_template("gpu.cause.why", annotation) == filled(meaning.says)
        assert print_template("gpu.cause.owner", annotation) == filled(meaning.number or meaning.owner)
        assert print_template("gpu.cause.site", annotation) == sentence(meaning.site)
    bare = f"{name} (high confidence)"  # an exporter of an earlier version, or numbers that are not known
    without = meaning.title if QUANTITY.search(meaning.says) else meaning.says
    assert print_template("gpu.cause.why", bare) == sentence(without)
    assert print_template("gpu.cause.owner", bare) == sentence(meaning.owner)


def test_a_cause_of_a_later_version_prints_no_other_ones_sentence() -> None:
    assert print_template("gpu.cause.owner", "cpu_quota_of_tomorrow (high confidence) cpus=4") == ""
