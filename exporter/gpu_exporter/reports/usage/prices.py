"""Prices of GPU-hours by cluster and model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from gpu_exporter.common.promql.vector import cluster_matchers
from gpu_exporter.reports.history.asking import History
from gpu_exporter.reports.usage.model import UsageReport

PRICE = "model:gpu_price:per_hour"  # the site's recording (alerts/prices.example.yaml)


def parse_price(text: str) -> tuple[str, float]:
    """Parses `MODEL=PRICE`, or `PRICE` for all other models. Raises ValueError."""
    model, _, number = text.rpartition("=")
    try:
        price = float(number)
    except ValueError:
        price = math.nan
    if not 0.0 <= price < math.inf:
        raise ValueError(f"{text!r} is not a price of a GPU-hour, such as 2.50 or 'NVIDIA H100 80GB HBM3=2.50'")
    return model.strip(), price


def refuse_twice(prices: Sequence[tuple[str, float]]) -> None:
    """Raises ValueError if a model, or all other models, have several prices."""
    for model, number in Counter(model for model, _ in prices).items():
        if number > 1:
            raise ValueError(f"{number} prices for {repr(model) if model else 'all other models'}: give only one")


class Prices:
    """The prices of GPU-hours by cluster and model. A price without a model or cluster applies to all others."""

    def __init__(
        self,
        by_place: Mapping[tuple[str, str], float],
        currency: str = "",
        given: Collection[str] = (),
        currencies: Sequence[str] = (),
    ) -> None:
        """`by_place`: prices by cluster and model. `given`: models that the user named. `currencies`: the currencies of
        the recorded prices, if there are several; these prices are then not used.
        """
        self._by_place, self._given, self._currencies = dict(by_place), given, currencies
        self.currency = currency

    def of(self, model: str, cluster: str = "") -> float | None:
        """Returns the price of this model in this cluster, None without a price. For an unknown cluster, returns the
        price only if it is the same in all clusters.
        """
        for name in (model, ""):
            for place in (cluster, ""):
                if (price := self._by_place.get((place, name))) is not None:
                    return price
            prices = {price for (_, other), price in self._by_place.items() if other == name}
            if not cluster and prices:
                return prices.pop() if len(prices) == 1 else None
        return None

    def __bool__(self) -> bool:
        return bool(self._by_place)

    def missing(self, report: UsageReport) -> Iterator[str]:
        """Yields a text with the remedy for each price without GPUs, and for each model without a price."""
        if self._currencies:
            yield (
                f"money: the prices have {len(self._currencies)} currencies: {', '.join(self._currencies)}; give "
                "--price, or take the clusters of one currency by --source.matcher"
            )
        models = {who.model for who in report.lines} | {each.model for each in report.capacity}
        for model in sorted(set(self._given) - models - {""}):
            yield f"the price of {model!r}: no GPU has this model; the models are {_list(models)}"
        if not self:
            return
        hours: dict[str, float] = {}
        for who, use in report.lines.items():
            if use.costs is None:
                hours[who.model] = hours.get(who.model, 0.0) + use.held
        for model, held in sorted(hours.items()):
            named, flag = (repr(model), f"'{model}=PRICE'") if model else ("an unknown model", "PRICE")
            yield (
                f"money for {held:,.1f} GPU-hours of {named}: this model has no price; add --price {flag}, or record "
                f"{PRICE}"
            )


def _list(models: Collection[str]) -> str:
    return ", ".join(repr(model) for model in sorted(models) if model) or "unknown"


def given_prices(given: Sequence[tuple[str, float]], currency: str) -> Prices:
    """Returns the user's prices."""
    return Prices({("", model): price for model, price in given}, currency, [model for model, _ in given])


def read_prices(
    history: History, end: float, given: Sequence[tuple[str, float]], currency: str, matcher: str = ""
) -> Prices:
    """Returns the user's prices, otherwise the prices that the site records. `matcher`: the user's label matchers.
    Raises AnswerError.
    """
    if given:
        return given_prices(given, currency)
    matchers = cluster_matchers(matcher)
    series = [f"{PRICE}{{{','.join(matchers)}}}", f'{PRICE}{{cluster=""}}'] if matchers else [PRICE]
    rows = history.ask_now("prices", " or ".join(f"last_over_time({each}[1d])" for each in series), end)
    prices: dict[tuple[str, str], float] = {}
    currencies = set()
    for row, price in rows:
        labels = dict(row)
        key = labels.get("cluster", ""), labels.get("name", "")
        prices[key] = max(price, prices.get(key, 0.0))  # as node:gpu_price_per_hour:max
        currencies.add(labels.get("currency", ""))
    currencies.discard("")
    if len(currencies) > 1:  # their money cannot be added
        return Prices({}, currencies=sorted(currencies))
    return Prices(prices, currency or "".join(currencies))
