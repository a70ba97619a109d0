from hypothesis import given
from hypothesis import strategies as st

from diloco_ds.core import portions
from diloco_ds.core.portions import Portions


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12))
def test_the_portions_hold_every_weight_once(numels):
    divided = Portions(numels)
    seen = [[0] * numel for numel in numels]
    for portion in range(divided.count):
        end = 0
        for piece in divided.pieces(portion):
            assert piece.at == end, "one behind the other"
            end += piece.high - piece.low
            for weight in range(piece.low, piece.high):
                seen[piece.fragment][weight] += 1
        assert 0 < end <= divided.weights
    assert all(count == 1 for fragment in seen for count in fragment)
    assert divided.numel == 2 * divided.weights


def test_a_portion_is_never_large(monkeypatch):
    assert Portions([400]).count == 4, "though there is one fragment"
    assert Portions([60] * 10).count == 10
    assert Portions([591] + [1] * 9).count == 10, "whatever the fragments' own sizes are"
    monkeypatch.setattr(portions, "MOST_WEIGHTS", 7)
    assert Portions([60] * 10).weights == 7
