"""What the paper published: transcribed as it stands, and consistent with the summary that was inferred from it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unlearnlib import published

# Of each table: the utility, the forget terms, the largest value of the scale, and what rounding of the printed inputs explains.
TOFU = ("model_utility", ("one_minus_rouge_l", "one_minus_prob", "one_minus_extraction"), 0.01)
MUSE = ("know_mem_retain", ("verb_mem_forget", "know_mem_forget", "priv_leak"), 0.05)
WMDP = ("mmlu", ("one_minus_accuracy",), 0.01)
SUMMARIES = {"tofu_05": TOFU, "tofu_10": TOFU, "muse_news": MUSE, "muse_books": MUSE, "wmdp_bio": WMDP}


def test_every_table_is_known_here():
    assert published.tables() == list(SUMMARIES)


@pytest.mark.parametrize("name", published.tables())
def test_the_printed_finals_follow_from_the_printed_terms(name):
    table = published.table(name)
    utility, forgetting, tolerance = SUMMARIES[name]
    for method in table.rows:
        terms = [table.value(method, column) for column in forgetting]
        if name.startswith("muse"):
            terms = [100 - abs(term) for term in terms]
        assert published.final(table.value(method, utility), terms) == pytest.approx(table.value(method, "final"), abs=tolerance)


@pytest.mark.parametrize("name", published.tables())
def test_a_table_is_complete_but_for_minutes_of_what_was_not_unlearned(name):
    table = published.table(name)
    assert table.headings.keys() == table.formats.keys()
    for method, row in table.rows.items():
        assert method in published.NAMES
        assert row.keys() == table.headings.keys()
        assert [column for column, value in row.items() if value is None] == (["minutes"] if method in ("full", "retain") else [])
        # No digit more than is printed.
        assert all(float(format(value, table.formats[column])) == value for column, value in row.items() if value is not None)


@pytest.mark.parametrize(
    "table, method, column, value",
    [
        ("tofu_05", "grom", "one_minus_rouge_l", 0.95),
        ("tofu_05", "simnpo", "minutes", 2.6),
        ("tofu_10", "retain", "one_minus_extraction", 0.94),
        ("tofu_10", "grom", "minutes", 0.5),
        ("muse_news", "grom", "priv_leak", -3.8),
        ("muse_books", "simnpo", "minutes", 53.8),
        ("wmdp_bio", "npo", "mmlu", 0.51),
        ("tofu_10", "alt_po", "final", None),
        ("tofu_10", "retain", "minutes", None),
    ],
)
def test_single_numbers(table, method, column, value):
    assert published.table(table).value(method, column) == value


def test_the_speed_up_is_that_of_the_printed_minutes():
    minutes = [published.table("muse_books").value(method, "minutes") for method in ("simnpo", "grom")]
    assert minutes[0] / minutes[1] == pytest.approx(published.claim("speedup_over_simnpo_on_muse_books"), rel=0.01)
    least, most = published.claim("baseline_minutes_least"), published.claim("baseline_minutes_most")
    printed = [published.table(name).value(method, "minutes") for name in published.tables() for method in ("simnpo", "npo")]
    assert all(least <= value <= most for value in printed if value is not None)


def test_what_is_not_there_is_an_error_that_lists_what_is():
    with pytest.raises(ValueError, match="no published table 'tofu_5'; there are tofu_05, tofu_10"):
        published.table("tofu_5")
    with pytest.raises(ValueError, match="no column 'prob'; it has one_minus_rouge_l"):
        published.table("tofu_05").value("grom", "prob")
    with pytest.raises(ValueError, match="no claim 'speed'"):
        published.claim("speed")
    with pytest.raises(ValueError, match="at least one forget term"):
        published.final(0.5, [])


def test_a_reader_cannot_change_the_tables():
    published.table("tofu_05").rows["grom"]["final"] = 1.0
    assert published.table("tofu_05").value("grom", "final") == 0.79


UNIT = st.floats(0, 1)


@given(UNIT, st.lists(UNIT, min_size=1, max_size=4))
def test_final_weighs_utility_as_much_as_all_forgetting(utility, forgetting):
    assert 0 <= published.final(utility, forgetting) <= 1
    assert published.final(utility, [utility] * len(forgetting)) == pytest.approx(utility)
    assert published.final(utility, forgetting) == pytest.approx(published.final(sum(forgetting) / len(forgetting), [utility]))
