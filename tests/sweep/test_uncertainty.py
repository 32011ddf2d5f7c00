"""Standard errors by their source, against formulas."""

import pytest
from helpers import write_run

from tupe.run.record import Record
from tupe.sweep.collection import collect, with_unit
from tupe.sweep.scores import Uncertainty, summarise


def tables_of(folder):
    found = Uncertainty(summarise(collect([folder]).finished))
    tables = found.score_table(), found.difference_table()
    return [[dict(zip(table.header, cells, strict=True)) for _, cells in table.rows] for table in tables]


def test_errors_by_their_source(tmp_path):
    for architecture, scores in (("bert_a_tiny", (60.0, 62.5, 65.0)), ("tupe_a_tiny", (62.5, 65.0, 67.5))):
        for seed, score in enumerate(scores, 1):
            write_run(tmp_path / architecture / f"{seed}", "RTE", 2e-5, seed, score, architecture=architecture)
    rows, (difference,) = tables_of(tmp_path)
    bert = next(row for row in rows if row["model"].startswith("bert_a"))
    assert bert["error by fine-tuning seeds"] == f"{2.5 / 3**0.5:.2f} (3)"
    assert bert["error by pre-training seeds"] == "? (1)" and bert["mean ± deviation"] == "62.50 ± 2.50"
    assert difference["mean: 95 % over fine-tuning seeds"] == "+2.50: +2.50 to +2.50 (3)"


@pytest.mark.parametrize(
    ("architecture", "updates", "reference"),
    [
        ("tupe_r", 1_000_000, "bert_a @ 1M"),
        ("tupe_r", 100_000, "bert_a @ 100k"),
        ("tupe_a_large", 1_000_000, "bert_a_large @ 1M"),
        ("electra_tupe_r", 1_000_000, "electra_a @ 1M"),
        ("bert_a", 1_000_000, None),
    ],
)
def test_differences_are_from_the_plain_model_of_the_same_kind(tmp_path, architecture, updates, reference):
    """Of the same family and size, after as many updates. Variants, which sort before, are not it."""
    plain = [("bert_a", 100_000), ("bert_a", 1_000_000), ("bert_a_large", 1_000_000), ("electra_a", 1_000_000)]
    for name, count in {*plain, (architecture, updates)}:
        path = f"/runs/{name}/{count}.pt"
        write_run(tmp_path / f"{name}{count}", "RTE", 2e-5, 1, 60.0, architecture=name, updates=count, pretrained=path)
    more = {"architecture": "bert_a", "updates": updates, "variant": "position shaw", "pretrained": "/runs/shaw.pt"}
    write_run(tmp_path / "variant", "RTE", 2e-5, 1, 60.0, **more)
    _, differences = tables_of(tmp_path)
    of_model = [row["minus"] for row in differences if row["model"] == f"{architecture} @ {with_unit(updates)}"]
    assert of_model == [reference] * (reference is not None)


def test_differences_need_a_reference_with_the_same_settings(tmp_path):
    write_run(tmp_path / "a", "RTE", 2e-5, 1, 60.0, architecture="bert_a", epochs=3)
    write_run(tmp_path / "b", "RTE", 2e-5, 1, 60.0, architecture="tupe_r", epochs=10)
    assert tables_of(tmp_path)[1] == []
    write_run(tmp_path / "c", "RTE", 2e-5, 1, 60.0, architecture="bert_a", epochs=10)
    _, differences = tables_of(tmp_path)
    assert [(row["model"], row["minus"]) for row in differences] == [
        ("tupe_r @ 1M", "bert_a @ 1M")  # of the usual length
    ]


def write_pretraining(folder, seed, data="corpus", lr=1e-3, arch="bert_a_tiny", config={}):  # noqa: B006
    """The record of a pre-training; returns the path of its checkpoint."""
    folder.mkdir(parents=True)
    Record("masked_lm", arch, seed=seed, lr=lr, data=data, config=config, started_at="today").save(folder)
    return str(folder / "checkpoint_last.pt")


@pytest.mark.parametrize("engine", ["fairseq", "torch"])
def test_several_runs_of_pre_training_show_what_it_varies(tmp_path, engine):
    for seed, score in enumerate((60.0, 62.0), 1):
        path = write_pretraining(tmp_path / "pretrained" / str(seed), seed)
        path = path if engine == "fairseq" else str(tmp_path / "pretrained" / str(seed))  # the folder is the model
        write_run(tmp_path / str(seed), "RTE", 2e-5, 1, score, architecture="bert_a_tiny", pretrained=path)
    rows, _ = tables_of(tmp_path)
    assert [row["error by pre-training seeds"] for row in rows] == ["1.00 (2)"] * 2
    assert [row["error by fine-tuning seeds"] for row in rows] == ["? (1)"] * 2


def test_differences_are_paired_by_the_seed_of_pre_training(tmp_path):
    """Two models, three pre-trainings each, whose differences are 1, 3 and 2: 2 +- t(2) / sqrt(3)."""
    for architecture, scores in (("bert_a_tiny", (60.0, 62.0, 64.0)), ("tupe_a_tiny", (61.0, 65.0, 66.0))):
        for seed, score in enumerate(scores, 1):
            path = write_pretraining(tmp_path / "pretrained" / f"{architecture}{seed}", seed, arch=architecture)
            write_run(tmp_path / f"{score}", "RTE", 2e-5, 1, score, architecture=architecture, pretrained=path)
    _, differences = tables_of(tmp_path)
    shown = [(row["model"].split()[0], row["mean: 95 % over pre-training seeds"]) for row in differences]
    assert shown == [("tupe_a_tiny", "+2.00: -0.48 to +4.48 (3)")] * 3
    assert [row["mean: 95 % over fine-tuning seeds"] for row in differences] == [f"+{n}.00: ? (1)" for n in (1, 3, 2)]


def test_the_reference_is_the_one_that_was_trained_alike(tmp_path):
    """At the same rate, whatever its seed and its path."""
    for architecture, scores in (("bert_a_tiny", (50.0, 60.0)), ("tupe_a_tiny", (61.0, 62.0))):
        for lr, score in zip((1e-3, 2e-3), scores, strict=True):
            seed = 3 if (architecture, lr) == ("bert_a_tiny", 2e-3) else 1
            path = write_pretraining(tmp_path / architecture / f"lr{lr}", seed, lr=lr, arch=architecture)
            write_run(tmp_path / f"{score}", "RTE", 2e-5, 1, score, architecture=architecture, pretrained=path)
    _, differences = tables_of(tmp_path)
    shown = {row["model"].split("lr")[1]: row["mean: 95 % over fine-tuning seeds"] for row in differences}
    assert len(differences) == 2 and all(row["model"].startswith("tupe_a_tiny") for row in differences)
    assert shown == {
        "0.001/checkpoint_last.pt] @ 1M": "+11.00: ? (1)",
        "0.002/checkpoint_last.pt] @ 1M": "+2.00: ? (1)",
    }


def test_pre_trainings_whose_batch_was_divided_otherwise_are_repetitions(tmp_path):
    for seed, size, steps, score in ((1, 32, 8, 60.0), (2, 16, 16, 61.0), (3, 32, 16, 63.0)):
        config = {"dataset.batch_size": size, "optimization.update_freq": [steps]}
        path = write_pretraining(tmp_path / "pretrained" / str(seed), seed, config=config)
        write_run(tmp_path / f"{seed}", "RTE", 2e-5, 1, score, architecture="bert_a_tiny", pretrained=path)
    rows, _ = tables_of(tmp_path)
    assert [row["error by pre-training seeds"] for row in rows] == ["0.50 (2)", "0.50 (2)", "? (1)"]


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"seed": 2, "data": "more"}, {"seed": 2, "lr": 2e-3}, {"seed": 2, "config": {"model.dropout": 0}},
     None],
    ids=["a copy", "another corpus", "another learning rate", "another dropout", "no record"],
)  # fmt: skip
def test_what_is_not_known_to_be_another_seed_of_pre_training_does_not_count_as_one(tmp_path, other):
    paths = [write_pretraining(tmp_path / "pretrained" / "1", 1), str(tmp_path / "pretrained" / "x" / "last.pt")]
    if other:
        paths[1] = write_pretraining(tmp_path / "pretrained" / "x", **other)
    for path, score in zip(paths, (60.0, 62.0), strict=True):
        folder = tmp_path / f"{score}"
        write_run(folder, "RTE", 2e-5, 1, score, architecture="bert_a_tiny", pretrained=path)
    rows, _ = tables_of(tmp_path)
    assert [row["error by pre-training seeds"] for row in rows] == ["? (1)"] * 2
