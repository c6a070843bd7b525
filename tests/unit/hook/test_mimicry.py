"""Every special method of an iterator or a loader behaves as without the hook: the same value, or the same error."""

from __future__ import annotations

import collections.abc
import copy
import operator
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from gpu_exporter_torch import observe


class Sized:
    """A loader with a length and items, which is empty now and then."""

    def __init__(self, number: int = 3) -> None:
        self.items = list(range(number))

    def __iter__(self) -> Iterator[int]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> int:
        return self.items[index]

    def __setitem__(self, index: int, value: int) -> None:
        self.items[index] = value

    def __contains__(self, value: object) -> bool:
        return value == "everything" or value in self.items

    def __add__(self, other: Any) -> list[int]:
        return [*self.items, *other]

    def __call__(self, number: int) -> int:
        return number + len(self.items)


class Falsy:
    """A loader that says itself whether there is something to do, and an iterator with a length."""

    def __iter__(self) -> Iterator[int]:
        return Counted()

    def __bool__(self) -> bool:
        return False


class Counted:
    def __init__(self) -> None:
        self.left = 2

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left

    def __len__(self) -> int:
        return self.left


def generate() -> Iterator[int]:
    yield from range(3)


class Stream:
    def __iter__(self) -> Iterator[int]:
        return generate()


LOADERS: dict[str, Callable[[], Iterable[int]]] = {
    "list": lambda: [1, 2, 3],
    "empty list": list,
    "tuple": lambda: (1, 2, 3),
    "set": lambda: {1, 2, 3},
    "dict": lambda: {1: 2, 3: 4},
    "range": lambda: range(3),
    "text": lambda: "abc",
    "generator": generate,
    "list iterator": lambda: iter([1, 2, 3]),
    "enumerate": lambda: enumerate([3, 4]),
    "sized": Sized,
    "sized and empty": lambda: Sized(0),
    "falsy": Falsy,
    "stream": Stream,
    "counted": Counted,
}  # fmt: skip


OTHER = [9]


def assign(one: Any) -> None:
    one[0] = 7


ASK: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "len": len,
    "length_hint": operator.length_hint,
    "first item": lambda one: one[0],
    "missing item": lambda one: one[99],
    "assign": assign,
    "contains": lambda one: 2 in one,
    "contains what it invents": lambda one: "everything" in one,
    "reversed": lambda one: list(reversed(one)),
    "add": lambda one: one + OTHER,
    "call": lambda one: one(4),
    "equals": lambda one: one == [1, 2, 3],
    "is hashable": lambda one: isinstance(hash(one), int),
    "Sized": lambda one: isinstance(one, collections.abc.Sized),
    "Hashable": lambda one: isinstance(one, collections.abc.Hashable),
    "Iterator": lambda one: isinstance(one, collections.abc.Iterator),
    "Container": lambda one: isinstance(one, collections.abc.Container),
    "has len": lambda one: hasattr(one, "__len__"),
    "has getitem": lambda one: hasattr(one, "__getitem__"),
    "all items": list,
    "two passes": lambda one: (list(one), list(one)),
    "unpacked": lambda one: [*one],
    "unknown attribute": lambda one: one.no_such_attribute,
}


def answer(ask: Callable[[Any], Any], one: Any) -> Any:
    try:
        return ask(one)
    except Exception as exc:
        return type(exc)


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("name", LOADERS)
def test_an_observed_loader_behaves_as_the_loader(name: str, ask: str) -> None:
    bare = answer(ASK[ask], LOADERS[name]())
    with observe(LOADERS[name](), summary=False) as observed:
        assert answer(ASK[ask], observed) == bare


@pytest.mark.parametrize("ask", ASK)
@pytest.mark.parametrize("name", LOADERS)
def test_its_iterator_behaves_as_that_of_the_loader(name: str, ask: str) -> None:
    bare = answer(ASK[ask], iter(LOADERS[name]()))
    with observe(LOADERS[name](), summary=False) as observed:
        assert answer(ASK[ask], iter(observed)) == bare


@pytest.mark.parametrize("name", LOADERS)
def test_the_loader_for_a_framework_and_its_copies_give_the_same_items(name: str) -> None:
    bare = list(LOADERS[name]())
    for give in (copy.copy, lambda one: pickle.loads(pickle.dumps(one))):
        with observe(LOADERS[name](), summary=False) as observed:
            try:
                given = give(observed.loader)
            except (TypeError, AttributeError, pickle.PicklingError):  # a generator, with or without the hook
                continue
            assert list(given) == bare


def test_the_iterator_of_a_generator_is_closed_and_is_true() -> None:
    """`if it:` raised TypeError here, which ended the training."""
    with observe(generate(), summary=False) as observed:
        iterator = iter(observed)
        assert iterator
        assert next(iterator) == 0
        iterator.close()  # type: ignore[attr-defined]
        assert list(iterator) == []
