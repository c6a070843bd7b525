"""The small form of `python -m tests.bench.shortages`: an owner is told of a shortage only if it is the owner's."""

from __future__ import annotations

from tests.bench.shortages import OWN, run, share


def test_what_neighbours_take_is_no_fault_of_the_owner_and_no_advice_is_the_opposite_of_the_right_one() -> None:
    verdicts = run(700, seed=5)
    neighbours = [each for each in verdicts if each.short.startswith("neighbours")]
    assert len(neighbours) > 100
    assert share(each.accused for each in neighbours) <= 0.02, [each for each in neighbours if each.accused]
    assert not [each for each in verdicts if each.opposite]
    for short in OWN:
        own = [each.named for each in verdicts if each.short == short]
        assert len(own) > 40
        assert share(own) >= 0.8, short
    assert share(each.accused for each in verdicts if each.short == "none") <= 0.02
