"""Loaders that tell an observation when the loop waits for them, and are otherwise the loader that they stand for."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from time import perf_counter_ns
from typing import Any, Protocol


class LoopListener(Protocol):
    """Is told what the loop does with the loader. None of its methods raises."""

    def make_iterator(self, loader: object, inner: object) -> None: ...

    def ask(self, loader: object, now: int, *, is_first: bool) -> None: ...

    def get(self, loader: object, asked: int, now: int, batch: object, *, is_first: bool) -> None: ...

    def end(self, loader: object) -> None: ...


class ObservedIterator:
    """The loader's own iterator, with the time of each `next`. What the loader raises passes unchanged."""

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

    def __len__(self) -> int:
        return len(self._inner)  # type: ignore[arg-type]  # raises TypeError as the loader's iterator does

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class ObservedIterable:
    """Stands for any iterable that is no DataLoader of torch."""

    def __init__(self, loader: Iterable[Any], listener: LoopListener) -> None:
        self._loader, self._listener = loader, listener

    def __iter__(self) -> Iterator[Any]:
        inner = iter(self._loader)
        self._listener.make_iterator(self._loader, inner)
        return ObservedIterator(inner, self._loader, self._listener)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_listener"):  # not set yet: unpickled or copied
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _give, (self._loader,)


def observe_loader(loader: Any, listener: LoopListener) -> Any:
    """A loader to iterate over instead of `loader`.

    A DataLoader of torch stays one: the result is an object of a class derived from the loader's own, with the same
    attributes in the same dictionary. So isinstance, len, set_epoch, state_dict and what Accelerate and Lightning read
    from a loader are as before, and a new loader that a framework makes from it is observed too.
    """
    data = sys.modules.get("torch.utils.data")
    if data is None or not isinstance(loader, data.DataLoader):
        return ObservedIterable(loader, listener)
    original = type(loader)

    def __iter__(self: Any) -> Iterator[Any]:  # noqa: N807
        inner = original.__iter__(self)
        listener.make_iterator(loader, inner)
        return ObservedIterator(inner, loader, listener)

    def __reduce__(self: Any) -> tuple[Any, ...]:  # noqa: N807  -- another process gets the plain loader
        return _give, (loader,)

    body = {"__iter__": __iter__, "__reduce__": __reduce__, "__module__": original.__module__}
    derived = type(original.__name__, (original,), body)
    observed: Any = object.__new__(derived)
    object.__setattr__(observed, "__dict__", loader.__dict__)
    return observed


def _give(loader: Any) -> Any:
    return loader
