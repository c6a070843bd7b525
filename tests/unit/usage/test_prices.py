"""Prices of a report: by cluster and model, and the texts about prices and GPUs that do not match."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from tests.testbed.usage import use

from gpu_exporter.cli.commands import COMMANDS
from gpu_exporter.common.address import Address, parse_address
from gpu_exporter.common.clock import ManualClock
from gpu_exporter.reports.history.asking import History
from gpu_exporter.reports.usage.model import Capacity, UsageReport, Who
from gpu_exporter.reports.usage.prices import Prices, read_prices, refuse_twice

END = 86400.0
H100, L4 = "NVIDIA H100 80GB HBM3", "NVIDIA L4"
Rows = list[tuple[dict[str, str], float]]


def recorded(rows: Rows, matcher: str = "", currency: str = "") -> tuple[Prices, str]:
    """The prices of recordings with these labels, and the query."""
    queries: list[str] = []

    def fetch(_address: Address, form: Mapping[str, str] | None, _most: int, _within: float) -> str:
        queries.append((form or {})["query"])
        found = [{"metric": labels, "values": [[END, str(price)]]} for labels, price in rows]
        return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": found}})

    history = History(parse_address("http://x"), fetch, clock=ManualClock())
    return read_prices(history, END, [], currency, matcher), queries[0]


def report(*lines: tuple[str, float, float | None], present: str = "") -> UsageReport:
    """A report with lines of model, GPU-hours and price, and capacity of the model `present`."""
    made = UsageReport(0.0, END)
    for at, (model, hours, price) in enumerate(lines):
        made.lines[Who(holder=f"pod-{at}", model=model)] = use(price, None, used=hours)
    made.capacity = [Capacity("", present, 24.0, 0.0, 24.0)] if present else []
    return made


def test_a_model_has_its_own_price_in_each_cluster() -> None:
    prices, _ = recorded(
        [
            ({"cluster": "east", "name": H100}, 4.0),
            ({"cluster": "west", "name": H100}, 1.0),
            ({"cluster": "east"}, 0.5),
            ({"name": L4}, 0.3),
        ]
    )
    assert (prices.of(H100, "east"), prices.of(H100, "west")) == (4.0, 1.0)
    assert prices.of("NVIDIA T4", "east") == 0.5, "the cluster's price of all other models"
    assert prices.of("NVIDIA T4", "west") is None
    assert prices.of(L4, "east") == prices.of(L4, "west") == 0.3, "a model's price comes before that of other models"
    assert prices.of(H100, "north") is None


def test_gpus_without_a_cluster_have_a_price_if_all_clusters_agree() -> None:
    prices, _ = recorded(
        [
            ({"cluster": "east", "name": H100}, 4.0),
            ({"cluster": "west", "name": H100}, 1.0),
            ({"cluster": "east", "name": L4}, 0.3),
            ({"cluster": "west", "name": L4}, 0.3),
            ({}, 9.0),
        ]
    )
    assert (prices.of(H100), prices.of(L4), prices.of("NVIDIA T4")) == (None, 0.3, 9.0)


def test_the_higher_of_two_recordings_counts_as_in_the_rules() -> None:
    for order in (1, -1):
        rows: Rows = [({"name": L4, "replica": "a"}, 0.3), ({"name": L4, "replica": "b"}, 0.4)]
        assert recorded(rows[::order])[0].of(L4) == 0.4


def test_prices_are_those_of_the_clusters_of_the_matcher() -> None:
    _, query = recorded([], 'job="dcgm",cluster="east"')
    assert query == (
        'last_over_time(model:gpu_price:per_hour{cluster="east"}[1d]) or '
        'last_over_time(model:gpu_price:per_hour{cluster=""}[1d])'
    )
    assert recorded([])[1] == "last_over_time(model:gpu_price:per_hour[1d])"


def test_two_currencies_give_no_money_and_are_named() -> None:
    rows: Rows = [({"name": H100, "currency": "EUR"}, 4.0), ({"name": L4, "currency": "USD"}, 1.0)]
    prices, _ = recorded(rows, currency="EUR")
    assert (bool(prices), prices.of(H100), prices.currency) == (False, None, "")
    assert list(prices.missing(report((H100, 5.0, None)))) == [
        "money: the prices have 2 currencies: EUR, USD; give --price, or take the clusters of one currency by "
        "--source.matcher"
    ]
    prices, _ = recorded([*rows[:1], ({"name": L4}, 1.0)])
    assert (prices.of(L4), prices.currency) == (1.0, "EUR")
    assert list(prices.missing(report((H100, 5.0, 4.0)))) == []


def given(*prices: tuple[str, float]) -> Prices:
    return read_prices(History(parse_address("http://x"), lambda *_: pytest.fail("asked")), END, prices, "EUR")


def test_a_given_price_without_gpus_is_named_with_the_models_that_exist() -> None:
    prices = given(("", 2.5), ("NVIDIA H100", 4.0), (L4, 0.3))
    assert list(prices.missing(report((H100, 5.0, 2.5), present=L4))) == [
        f"the price of 'NVIDIA H100': no GPU has this model; the models are '{H100}', '{L4}'"
    ]
    assert list(given(("", 2.5), (H100, 4.0)).missing(report((H100, 5.0, 4.0)))) == []
    assert list(given((L4, 4.0)).missing(report(("", 5.0, None)))) == [
        f"the price of '{L4}': no GPU has this model; the models are unknown",
        "money for 5.0 GPU-hours of an unknown model: this model has no price; add --price PRICE, or record "
        "model:gpu_price:per_hour",
    ]


def test_a_model_without_a_price_is_named_with_its_hours_and_the_remedy() -> None:
    prices, _ = recorded([({"name": H100}, 4.0)])
    assert list(prices.missing(report((H100, 5.0, 4.0), (L4, 1.5, None), (L4, 2.0, None)))) == [
        f"money for 3.5 GPU-hours of '{L4}': this model has no price; add --price '{L4}=PRICE', or record "
        "model:gpu_price:per_hour"
    ]
    assert list(recorded([])[0].missing(report((L4, 5.0, None)))) == [], "a report without prices wants no money"


@pytest.mark.parametrize(
    ("twice", "named"),
    [(("2", "3"), "2 prices for all other models"), ((f"{L4}=2", f"{L4}=2"), f"2 prices for '{L4}'")],
)
def test_two_prices_for_the_same_models_are_refused(
    twice: tuple[str, str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        COMMANDS["report"].run(["--source.prometheus=http://127.0.0.1:1", *(f"--price={each}" for each in twice)])
    assert ended.value.code == 2
    assert f"--price: {named}: give only one" in capsys.readouterr().err
    refuse_twice([("", 1.0), (L4, 1.0), (H100, 1.0)])
