"""The pages of the finished experiments against the committed tables, and the numbers against scipy."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

from lab import recompute
from lab.estimates import contrast
from lab.plan import LATER, Trial

# Decimals of no table: a margin, a prediction, arXiv's numbers, the scale at which vectors start, a name, a p-value of
# one digit
GIVEN = [
    "0.1 bits",
    "We had predicted 0.5.",
    "had predicted 0.05 to 0.25",
    "arxiv.org",
    "a scale of 1 instead of 0.02",
    "`absolute_0.06`",
    "(p = 0.0002)",
]


@pytest.fixture(scope="module")
def evidence():
    return recompute.Evidence()


def changed(text, place):
    """The same with another digit there."""
    return text[:place] + str((int(text[place]) + 1) % 10) + text[place + 1 :]


def test_the_pages_say_what_the_tables_do():
    assert list(recompute.faults()) == []


@pytest.mark.parametrize("page", ["README.md", "docs/results.md", "docs/evidence/details.md"])
def test_every_decimal_of_a_page_is_compared(page, evidence):
    """... in README.md between the lines that are of the experiment."""
    text, sayings = (recompute.ROOT / page).read_text(encoding="utf-8"), list(recompute.SAYINGS[page](evidence))
    begin, end = 0, len(text)
    if page == "README.md":
        begin, end = text.index("**TUPE gives small BERTs"), text.index("<!-- end -->")
    for number in re.finditer(r"\d+\.\d+", text[begin:end]):
        place = begin + number.end() - 1
        if not any(given in text[place - 30 : place + 10].replace("\n", " ") for given in GIVEN):
            assert recompute.unsaid(changed(text, place), sayings), text[place - 40 : place + 10]


@pytest.mark.parametrize("page", ["docs/index.md", "docs/start.md"])
def test_a_changed_sentence_is_found(page, evidence):
    (saying,) = recompute.SAYINGS[page](evidence)
    place = re.search(r"\d", saying).start()
    assert recompute.unsaid(changed(saying, place), [saying]) == [saying]


@pytest.mark.parametrize("page", recompute.ROWS)
def test_a_changed_row_is_found(page, evidence):
    """The first loss, difference or mean of five rows."""
    text = (recompute.FIRST / f"{page}.md").read_text(encoding="utf-8")
    tables = [table for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE) if "| seed" in table[:200]]
    places = []
    for table in tables:
        begin = text.index(table)
        places += [begin + m.end(1) - 1 for m in re.finditer(r"\| (-?\d+\.\d{3}) \|", table)]
    assert places and not list(recompute.wrong_rows(evidence.runs, page, text))
    for place in places[:: max(1, len(places) // 5)]:
        assert list(recompute.wrong_rows(evidence.runs, page, changed(text, place))), text[place - 80 : place + 5]


def test_what_pages_say_in_words_holds(evidence):
    """Each model of TUPE's leaves the plateau before BERT-A, with every seed. Less than half of its lead is left at
    tiny size, more at mini size; larger vectors alone leave early, too, and fall behind."""
    runs, of = evidence.runs, evidence.of
    for stage, berts in (("main", "main"), ("slower", "main"), ("controls", "controls"), ("longer", "longer")):
        assert max(one.exit for one in of(stage, "tupe_a")) < min(one.exit for one in of(berts, "bert_a"))
    for model in recompute.TUPES:
        short, long = (evidence.differences(stage, model, "bert_a").differences for stage in ("controls", "longer"))
        assert all(abs(long[seed]) < abs(short[seed]) / 2 for seed in (1, 2))
        short, long = recompute.gaps(runs, "lasting", model)
        assert all(short.differences[n] / 2 < long.differences[n] < short.differences[n] for n in (1, 2, 3))
        mine = of("lasting", model)
        assert all(one.fit.residual < one.fit.without / 5 and 0.15 < one.gaps[4000] < 0.3 for one in mine)
    larger = of("bundle", "absolute_0.06")
    assert max(one.exit for one in larger) < min(one.exit for one in of("decide", "bert_r"))
    assert max(one.gaps[2000] for one in larger) < 0
    lower = [
        {pair for pair, one in recompute.verdicts_of_c(runs, c, d).items() if one.verdict == "lower"}
        for d, c in recompute.BOTH_SIZES.items()
    ]
    assert set.intersection(*lower) == {("both", "bert_a"), ("tupe_a_tie_cls", "untied_raw")}


def made_up(means, seeds=(4, 5, 6, 7, 8)):
    """Runs whose final losses are these, and a little noise that no two models share."""
    finals = {
        model: {n: mean + 0.02 * np.random.default_rng([n, *model.encode()]).normal() for n in seeds}
        for model, mean in means.items()
    }
    return SimpleNamespace(finals=lambda *stages: finals)


MEANS = {"bert_a": 6.5, "bert_a_d": 5.7, "tupe_a_tie_cls": 5.71, "tupe_a": 5.7, "bert_r": 5.9, "tupe_r": 6.0}


def test_five_seeds_decide_the_contrasts_and_the_bundle():
    runs = made_up(MEANS | {"absolute_0.06": 6.2, "untied_raw": 5.705, "both": 6.51, "absolute_halved": 6.49})
    found = recompute.verdicts_of_d(runs, "tiny_decide")
    assert [one.verdict for one in found.values()] == [
        "confirmed", "no more than 0.1 bits", "confirmed", "refuted", "refuted", "no more than 0.1 bits"
    ]  # fmt: skip
    finals = runs.finals()
    for (a, b), one in found.items():
        test = stats.ttest_rel([*finals[a].values()], [*finals[b].values()])
        assert one.contrast.interval == pytest.approx(tuple(test.confidence_interval()))
    parts = [one.verdict for one in recompute.verdicts_of_c(runs).values()]
    assert parts == ["lower", "not resolved", "not resolved", "lower", "not resolved"]


def test_the_correction_is_holms():
    finals = made_up(MEANS | {"bert_a": 5.95, "tupe_r": 5.89}).finals()
    p = [stats.ttest_rel(*([*finals[model].values()] for model in pair)).pvalue for pair in recompute.CONTRASTS]
    order = np.argsort(p)
    by_hand = np.minimum(1, np.maximum.accumulate([(5 - rank) * p[i] for rank, i in enumerate(order)]))
    assert np.array(recompute.corrected(finals, recompute.CONTRASTS))[order] == pytest.approx(by_hand)


def test_seeds_that_were_known_do_not_confirm_alone(monkeypatch):
    runs = made_up(MEANS)
    runs.finals()["bert_r"][8] = 6.9  # above BERT-A, unlike the mean
    monkeypatch.setattr(recompute, "ALPHA", 1.0)
    assert recompute.verdicts_of_d(runs, "tiny_decide")["bert_r", "bert_a"].verdict == "confirmed"
    monkeypatch.setitem(LATER["stages"]["tiny_decide"], "fresh", [8])
    assert recompute.verdicts_of_d(runs, "tiny_decide")["bert_r", "bert_a"].verdict == "not resolved"


def test_losses_are_compared_at_equal_updates_after_the_exits():
    """Straight curves from 9 bits: BERT-A's from update 2,000, TUPE-A's from 1,000."""
    updates, runs = list(range(50, 5001, 50)), SimpleNamespace(threshold=8.0, curves={})
    for model, begin in (("bert_a", 2000), ("tupe_a", 1000)):
        losses = np.interp(updates, [0, begin, 5000], [9, 9, 5])
        runs.curves[Trial("main", model, "mini", 5000, 1e-3, 1)] = updates, losses.tolist()
    found, n = recompute.after_exit(runs, runs.curves)
    assert n == 2250  # BERT-A leaves after 2,750
    assert contrast(found["bert_a"], found["tupe_a"]).mean == pytest.approx(-n * (4 / 3000 - 4 / 4000))


def test_no_interval_comes_from_two_seeds(evidence):
    assert {len(seeds) for seeds in evidence.runs.finals("longer").values()} == {2}
    assert not re.search(r"\[-?[\d.]+, ", (recompute.FIRST / "longer.md").read_text(encoding="utf-8"))


def test_dated_changes_are_as_many_as_the_pages_say():
    changes = re.findall(r"^\| (\d+) \| 2026-11-2\d \|", (recompute.FIRST / "changes.md").read_text(), re.MULTILINE)
    assert [int(number) for number in changes] == list(range(1, 13))
    for name in ("docs/results.md", "docs/evidence/details.md", "docs/protocol.md"):
        assert "twelve dated changes" in " ".join((recompute.ROOT / name).read_text().lower().split())
