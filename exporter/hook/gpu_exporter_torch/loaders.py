"""Wraps loaders. A wrapper reports to an observation when the loop waits for a batch, and else behaves like it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator
from time import perf_counter_ns
from typing import Any, Protocol

# Python looks these up in the class, so __getattr__ does not give them. Iteration and the rest are the hook's own.
SPECIAL = (
    *("__len__", "__length_hint__", "__bool__", "__getitem__", "__setitem__", "__delitem__", "__contains__"),
    *("__reversed__", "__eq__", "__hash__", "__call__", "__add__"),
)


@functools.lru_cache(maxsize=256)
def mimic(base: Any, original: Any, name: str) -> Any:
    """Makes a subclass of `base` with the special methods of `original`.

    The methods call the object in the attribute `name`. So the truth value and the length of a wrapper are the same as
    without the hook, e.g. in `if loader:`.
    """
    try:
        body: dict[str, Any] = {}
        for each in reversed(original.__mro__[:-1]):  # without object
            for special in SPECIAL:
                if special in vars(each):  # None means that the method does not exist, as __hash__ of a list
                    body[special] = _forward(special, name) if vars(each)[special] is not None else None
        return type(base.__name__, (base,), body) if body else base
    except Exception:  # an unusual class: its special methods are missing, and the loop goes on
        return base


def _forward(special: str, name: str) -> Any:
    def method(self: Any, *arguments: Any) -> Any:
        return getattr(getattr(self, name), special)(*arguments)

    return method


class LoopListener(Protocol):
    """Receives the loop's calls on the loader. None of its methods raises."""

    def make_iterator(self, loader: object, inner: object) -> None: ...

    def ask(self, loader: object, now: int, *, is_first: bool) -> None: ...

    def get(self, loader: object, asked: int, now: int, batch: object, *, is_first: bool) -> None: ...

    def end(self, loader: object) -> None: ...


class ObservedIterator:
    """Wraps the loader's own iterator, and measures the time of each `next`. Passes on its exceptions."""

    def __init__(self, inner: Iterator[Any], loader: object, listener: LoopListener) -> None:
        self._inner, self._loader, self._listener = inner, loader, listener
        self._is_first = True

    def __iter__(self) -> ObservedIterator:
        return self

    def __next__(self) -> Any:
        asked = perf_counter_ns()
        self._listener.ask(self._loader, asked, is_first=self._is_first)
        try:
            batch = next(self._inner)
        except StopIteration:
            self._listener.end(self._loader)
            raise
        self._listener.get(self._loader, asked, perf_counter_ns(), batch, is_first=self._is_first)
        self._is_first = False
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class ObservedIterable:
    """Wraps any iterable that is not a DataLoader of torch."""

    def __init__(self, loader: Iterable[Any], listener: LoopListener) -> None:
        self._loader, self._listener = loader, listener

    def __iter__(self) -> Iterator[Any]:
        inner = iter(self._loader)
        self._listener.make_iterator(self._loader, inner)
        kind: Any = type(inner)
        observed: Iterator[Any] = mimic(ObservedIterator, kind, "_inner")(inner, self._loader, self._listener)
        return observed

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_listener"):  # not set yet: unpickled or copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _give, (self._loader,)


def observe_loader(loader: Any, listener: LoopListener) -> Any:
    """Makes the wrapper that the loop iterates over instead of `loader`.

    For a DataLoader of torch, the class of the wrapper is derived from the loader's class, and both objects share one
    attribute dictionary. So isinstance, len, set_epoch and state_dict work as before, and so do the attributes that
    Accelerate and Lightning read. If a framework makes a new loader from the wrapper, that loader is observed too.
    """
    data = sys.modules.get("torch.utils.data")
    original: Any = type(loader)
    if data is None or not isinstance(loader, data.DataLoader):
        return mimic(ObservedIterable, original, "_loader")(loader, listener)

    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
        inner = original.__iter__(self)
        listener.make_iterator(loader, inner)
        kind: Any = type(inner)
        observed: Iterator[Any] = mimic(ObservedIterator, kind, "_inner")(inner, loader, listener)
        return observed

    def __reduce__(self: Any) -> tuple[Any, ...]:  # noqa: N807  -- another process gets the plain loader
        return _give, (loader,)

    body = {"__iter__": __iter__, "__reduce__": __reduce__, "__module__": original.__module__}
    derived = type(original.__name__, (original,), body)
    observed: Any = object.__new__(derived)
    object.__setattr__(observed, "__dict__", loader.__dict__)
    return observed


def _give(loader: Any) -> Any:
    return loader
