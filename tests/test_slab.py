from __future__ import annotations

from itertools import pairwise

from autotune.measure.slab import ALIGNMENT, Slab


def test_sections_and_guards_cover_everything_without_overlap():
    slab = Slab.of({"A": 1000, "B": 4, "C": 256}, guard_bytes=512)
    spans = sorted((*slab.sections, *slab.guards), key=lambda span: span.begin)
    assert spans[0].begin == 0
    assert all(left.end == right.begin for left, right in pairwise(spans))
    assert spans[-1].end == slab.total
    assert [span.name for span in spans] == [
        *("before A", "A", "between A and B", "B", "between B and C", "C", "after C"),
    ]


def test_sections_keep_their_size_and_are_aligned():
    slab = Slab.of({"A": 1000, "B": 4}, guard_bytes=512)
    assert [section.size for section in slab.sections] == [1000, 4]
    assert all(section.begin % ALIGNMENT == 0 for section in slab.sections)
    assert all(guard.size >= 512 for guard in slab.guards)
    assert slab["B"].words == (slab["B"].begin // 4, slab["B"].begin // 4 + 1)


def test_guards_begin_right_behind_a_section():
    slab = Slab.of({"A": 1000, "B": 4}, guard_bytes=512)
    assert slab.guards[1].begin == slab["A"].end
    assert slab.guards[2].begin == slab["B"].end
