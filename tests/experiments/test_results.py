"""Reports: what is found in folders of runs, the paper's choice of configurations and averages, the pages."""

import csv
import json
import math
import re
import runpy
import shutil
import statistics
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import torch
from helpers import write_data

from tupe.architectures import split_size
from tupe.experiments import report
from tupe.experiments.report import write_report
from tupe.experiments.results import (
    PAPER_COLUMNS,
    Model,
    average,
    collect,
    configuration_table,
    correlations,
    counterpart,
    lost,
    metric_table,
    paper_row,
    paper_tables,
    pretraining,
    published,
    summarise,
    unigram_entropy,
)
from tupe.plugin.glue import TASKS


def write_run(
    folder, task, lr, seed, score, *, architecture="tupe_r", updates=1_000_000, epochs=2, finished=True, **more
):
    """A folder as a run of `task` leaves it: `score` at its best epoch, the first, and 1 less at the last."""
    splits = [split for split, _ in TASKS[task].files if split.startswith("valid")]
    records = []
    for epoch in range(1, epochs + 1 if finished else epochs):
        for n, split in enumerate(splits):
            value = score + n - (epoch > 1)
            found = dict.fromkeys(TASKS[task].metrics, value)
            records.append(
                {"epoch": epoch, "num_updates": 10 * epoch, "split": split, "loss": 0.5, **found, "best": epoch == 1}
            )
    result = {
        "task": task, "architecture": architecture, "pretrained": f"/runs/{architecture}.pt", "seed": seed, "lr": lr,
        "pretrained_updates": updates, "max_epoch": epochs, "splits": splits, "metrics": list(TASKS[task].metrics),
        "command": ["train", "--a", "<b>"], "versions": {"torch": "2"}, "commit": "abc", "device": "CPU",
        "finished_at": "today", "records": records, **more,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "scores.json").write_text(json.dumps(result))


def write_sweep(folder, tasks, scores, **options):
    """scores: {lr: [score of seed 1, 2, ...]}"""
    for task in tasks:
        for lr, values in scores.items():
            for seed, value in enumerate(values, 1):
                write_run(folder / task / f"lr{lr:g}_seed{seed}", task, lr, seed, value, **options)


# ---------------------------------------------------------------------------------------------------------- published


def test_all_published_averages_are_the_mean_of_their_nine_columns():
    rows = [row for table in published()["tables"] for row in table["rows"]]
    assert len(rows) == 14 and published()["columns"] == PAPER_COLUMNS
    for row in rows:
        values = dict(zip(PAPER_COLUMNS, row["scores"], strict=True))
        assert round(average(values), 2) == row["average"], row["name"]
        # With MNLI counted once, or WNLI-like columns left in, the printed numbers do not come out.
        once = {**values, "MNLI-m": (values["MNLI-m"] + values["MNLI-mm"]) / 2}
        assert round(average(once, PAPER_COLUMNS[:1] + PAPER_COLUMNS[2:]), 2) != row["average"]


def test_sizes_and_counterparts():
    assert split_size("tupe_a_tie_cls_large") == ("tupe_a_tie_cls", "large")
    assert split_size("tupe_a_tie_cls") == ("tupe_a_tie_cls", "base")
    base, large, electra = published()["tables"]

    def name(table, architecture, updates):
        row = counterpart(table, Model(architecture, updates, "x"))
        return row and row["name"]

    assert name(base, "tupe_r", 1_000_000) == "TUPE-R" and name(base, "tupe_r", 300_000) == "TUPE-R mid"
    assert name(base, "tupe_r_tiny", 500) == "TUPE-R"  # another size: beside the fully trained row
    assert name(base, "tupe_r_large", 1_000_000) is None and name(large, "tupe_r", 1_000_000) is None
    assert name(large, "bert_a_large", 900_000) == "BERT-Large" and name(electra, "electra_a_mini", 1) == "ELECTRA"
    assert name(base, "nopos", 1_000_000) is None


# -------------------------------------------------------------------------------------------------------- summarising


def test_median_of_seeds_then_best_configuration(tmp_path):
    # The mean would choose 2e-5, the single best seed 5e-5; the median chooses 3e-5.
    write_sweep(tmp_path, ["CoLA"], {2e-5: [50, 50, 90], 3e-5: [60, 61, 20], 5e-5: [10, 20, 95]})
    found = collect([tmp_path])
    (model,) = summaries = summarise(found.runs, "best")
    assert summaries[model]["CoLA"].lr == 3e-5
    assert paper_row(summaries[model]) == {"CoLA": (60, [60, 61, 20])}
    assert paper_row(summarise(found.runs, "last")[model]) == {"CoLA": (59, [59, 60, 19])}


def test_failed_runs_are_in_the_table_and_win_nothing(tmp_path):
    """One seed of 3e-5 is left, with the highest score; 5e-5 has none."""
    write_sweep(tmp_path, ["RTE"], {2e-5: [60, 61, 62], 3e-5: [90]}, architecture="bert_a")
    for lr, seeds in ((3e-5, (2, 3)), (5e-5, (1,))):
        for seed in seeds:
            folder = tmp_path / "RTE" / f"lr{lr:g}_seed{seed}"
            write_run(folder, "RTE", lr, seed, 1.0, architecture="bert_a", finished=False)
            (folder / "failed.json").write_text('{"reason": "diverged", "killed": false}')
    found = collect([tmp_path])
    (model,) = summarise(found.runs, "best")
    assert summarise(found.runs, "best")[model]["RTE"].lr == 2e-5
    header, rows = configuration_table(model, "RTE", found.runs, found.broken)
    best = [cells for epoch, cells in rows if epoch == "best"]
    assert header[2:5] == ["seed 1", "seed 2", "seed 3"]
    assert [cells[0] for cells in best] == ["2e-05", "3e-05", "5e-05"]
    assert best[1][2:] == ["90.00", "failed", "failed", "90.00", "?"]
    assert best[2][2:] == ["failed", "", "", "", ""]
    page = write_report(found, tmp_path / "report").read_text()
    assert "<td>failed</td>" in page and "of 7 runs" in page  # with their command lines


def test_a_task_whose_runs_all_failed_is_in_the_tables(tmp_path):
    write_sweep(tmp_path / "a", ["RTE", "CoLA"], {2e-5: [60]}, architecture="bert_a")
    write_sweep(tmp_path / "b", ["RTE"], {2e-5: [60]}, architecture="tupe_a")
    write_run(tmp_path / "c", "CoLA", 2e-5, 1, 1.0, architecture="tupe_a", finished=False)
    (tmp_path / "c" / "failed.json").write_text('{"reason": "diverged", "killed": false}')
    found = collect([tmp_path])
    summaries = summarise(found.runs, "best")
    (_, _, header, rows), *_ = paper_tables(summaries, lost(found))
    ours = {cells[0].split()[0]: cells[header.index("CoLA")] for kind, cells in rows if kind == "ours"}
    assert ours == {"bert_a": "60.00", "tupe_a": "failed"}
    header, rows = metric_table(summaries, lost(found))
    assert [cells[header.index("CoLA matthews")] for _, cells in rows] == ["60.00 ± ?", "failed"]
    page = write_report(found, tmp_path / "report").read_text()
    assert page.count("<h3>CoLA matthews</h3>") == 2


def test_both_mnli_sets_are_of_one_configuration(tmp_path):
    write_sweep(tmp_path, ["MNLI"], {2e-5: [80], 3e-5: [79]})
    row = paper_row(next(iter(summarise(collect([tmp_path]).runs, "best").values())))
    assert row == {"MNLI-m": (80, [80]), "MNLI-mm": (81, [81])}


def test_wnli_is_outside_of_the_average(tmp_path):
    write_sweep(tmp_path, TASKS, {2e-5: [80]})
    row = paper_row(next(iter(summarise(collect([tmp_path]).runs, "best").values())))
    assert set(row) == {*PAPER_COLUMNS, "WNLI"}
    values = {column: value for column, (value, _) in row.items()}
    assert average({**values, "WNLI": 0.0}) == pytest.approx((8 * 80 + 81) / 9, abs=1e-12)
    del values["RTE"]
    assert average(values) is None


# --------------------------------------------------------------------------------------------------------- collecting


def test_missing_failed_duplicate_and_foreign_runs(tmp_path):
    sweep = tmp_path / "sweep"
    write_run(sweep / "RTE" / "lr2e-05_seed1", "RTE", 2e-5, 1, 60.0)
    (sweep / "RTE" / "lr2e-05_seed2").mkdir()
    (sweep / "RTE" / "lr2e-05_seed2" / "failed.json").write_text('{"reason": "out of memory", "killed": false}')
    write_run(sweep / "RTE" / "lr2e-05_seed3", "RTE", 2e-5, 3, 60.0, finished=False)
    grid = {"--task": ["RTE"], "--lr": ["2e-05"], "--seed": ["1", "2", "3", "4"]}
    settings = {"recipe": "finetune", "grid": grid, "common": {}}
    (sweep / "sweep.json").write_text(json.dumps(settings))
    (sweep / "RTE" / "lr2e-05_seed4").mkdir()
    (sweep / "RTE" / "lr2e-05_seed4" / "scores.json").write_text("{")
    write_run(tmp_path / "copy", "RTE", 2e-5, 1, 60.0)
    for key, value in (("records", []), ("versions", None), ("splits", ["test"])):
        write_run(tmp_path / "foreign" / key, "RTE", 2e-5, 9, 60.0, **{key: value})
        path = tmp_path / "foreign" / key / "scores.json"
        content = json.loads(path.read_text())
        if value is None:
            del content[key]
        for record in content["records"]:
            record["split"] = content["splits"][0]
            record["best"] = False
        path.write_text(json.dumps(content))
    write_run(tmp_path / "rerun", "RTE", 2e-5, 1, 61.0)
    for name, content in (("broken", "{"), ("list", "[1]"), ("other", '{"accuracy": 1}')):
        (tmp_path / "foreign" / name).mkdir(parents=True)
        (tmp_path / "foreign" / name / "scores.json").write_text(content)
    found = collect([sweep, tmp_path])
    assert [key[1:] for key in found.runs] == [("RTE", 2e-5, 1)]
    assert found.failed == [(sweep / "RTE" / "lr2e-05_seed2", "out of memory")]
    assert [(path.name, reason) for path, reason in found.missing] == [
        ("lr2e-05_seed3", "not run yet"),
        ("lr2e-05_seed4", "not run yet"),
    ]
    left_out = {path.name: reason for path, reason in found.left_out}
    assert left_out["lr2e-05_seed3"] == "not finished"
    assert "same scores" in left_out["copy"] and "OTHER scores" in left_out["rerun"]
    for name in ("broken", "list", "other", "versions", "splits", "lr2e-05_seed4"):
        assert "not a run of this project" in left_out[name], name
    assert left_out["records"] == "not finished"
    page = write_report(found, tmp_path / "report").read_text()
    for text in (
        "out of memory",
        "lr2e-05_seed4",
        "OTHER scores",
        "not a run of this project",
        "1 finished runs, 1 failed",
    ):
        assert text in page


def test_folders_without_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no finished or failed run in"):
        collect([tmp_path])
    with pytest.raises(ValueError, match="is not a folder"):
        collect([tmp_path / "nowhere"])


# -------------------------------------------------------------------------------------------------------------- pages


def test_report(tmp_path):
    write_sweep(tmp_path / "a", TASKS, {2e-5: [80.25, 80.5, 81.0], 5e-5: [70.0]})
    write_sweep(tmp_path / "b", ["RTE", "CoLA"], {2e-5: [50.0]}, architecture="bert_a_tiny", updates=2450)
    page = write_report(collect([tmp_path]), tmp_path / "report").read_text()
    markdown = (tmp_path / "report" / "report.md").read_text()
    for text in (page, markdown):
        assert "TUPE-R (1M)" in text and "tupe_r @ 1M" in text and "bert_a_tiny @ 2450" in text
        assert "minus BERT-A (1M, base size)" in text and f"{80.5 - 73.56:+.2f}" in text
        assert f"± {statistics.stdev([80.25, 80.5, 81.0]):.2f} (3)" in text and "mean of CoLA RTE" in text
        assert "best epoch of each run" in text and "last epoch of each run" in text
        assert "ICLR 2021, Table 1" in text
    assert f"{statistics.mean([80.25, 80.5, 81.0]):.2f} ± {statistics.stdev([80.25, 80.5, 81.0]):.2f}" in page
    assert "http" not in page.replace("http://www.w3.org", ""), "the page must not load anything"
    linked = re.findall(r"!\[.*?\]\((.*?)\)", markdown)
    assert len(linked) == len(TASKS) and all((tmp_path / "report" / name).read_text()[:5] == "<?xml" for name in linked)
    assert "train --a &lt;b&gt;" in page and page.count("data:image/svg+xml") == len(TASKS)
    with (tmp_path / "report" / "runs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == sum(4 * 2 * len(task.metrics) * (1 + (name == "MNLI")) for name, task in TASKS.items()) + 2 * 3
    assert {row["architecture"] for row in rows} == {"tupe_r", "bert_a_tiny"}


def test_variants_of_an_architecture_are_models_of_their_own(tmp_path):
    write_run(tmp_path / "a", "RTE", 2e-5, 1, 60.0, architecture="bert_a_tiny")
    for position in ("sinusoidal", "shaw"):
        more = {"variant": f"position {position}", "pretrained": f"{position}.pt"}
        write_run(tmp_path / position, "RTE", 2e-5, 1, 61.0, architecture="bert_a_tiny", **more)
    found = collect([tmp_path])
    assert len(found.runs) == 3
    page = write_report(found, tmp_path / "report").read_text()
    assert "bert_a_tiny (position sinusoidal) @ 1M" in page and "bert_a_tiny (position shaw) @ 1M" in page
    assert page.count("minus BERT-A (1M, base size)") == 2  # best and last epoch of the one that is in the paper


def test_mean_over_glue_takes_f1_and_spearman_and_leaves_wnli_out(tmp_path):
    for seed in (1, 2, 3):
        for task, score in {"CoLA": 10 * seed, "WNLI": 99, "MRPC": 80, "STS-B": 70}.items():
            folder = tmp_path / f"{task}{seed}"
            write_run(folder, task, 2e-5, seed, score)
            result = json.loads((folder / "scores.json").read_text())
            for record in result["records"]:
                record.update({"f1": 60.0, "spearman": 50.0})
            (folder / "scores.json").write_text(json.dumps(result))
    header, rows = metric_table(summarise(collect([tmp_path]).runs, "best"))
    assert header[1] == "mean of 3 (F1, Spearman; no WNLI)"
    means = [(10 * seed + 60 + 50) / 3 for seed in (1, 2, 3)]
    assert rows[0][1][1] == f"{statistics.mean(means):.2f} ± {statistics.stdev(means):.2f}"
    (tmp_path / "CoLA2" / "scores.json").unlink()  # a seed that is not there in one of them does not count
    means = [means[0], means[2]]
    _, rows = metric_table(summarise(collect([tmp_path]).runs, "best"))
    assert rows[0][1][1] == f"{statistics.mean(means):.2f} ± {statistics.stdev(means):.2f}"
    for folder in [*tmp_path.glob("MRPC*"), *tmp_path.glob("STS-B*")]:
        shutil.rmtree(folder)
    header, rows = metric_table(summarise(collect([tmp_path]).runs, "best"))  # no mean of one column
    assert header[1].startswith("CoLA") and all(len(cells) == len(header) for _, cells in rows)


@pytest.mark.parametrize("loss, verdict", [(3.0, "yes, 1."), (3.4, "FAILED, 0.")])
def test_pretraining_is_judged_by_the_unigram_entropy(tmp_path, loss, verdict):
    data = write_data(tmp_path / "data")
    counts = np.bincount(np.fromfile(data / "train.bin", dtype=np.uint16))
    entropy = scipy.stats.entropy(counts)
    assert unigram_entropy(data) == pytest.approx(entropy)
    checkpoint = {
        "cfg": {"task": {"data": str(data)}, "model": {"_name": "tupe_r"}, "criterion": {"_name": "masked_lm_chunked"}},
        "extra_state": {"val_loss": loss}, "optimizer_history": [{"num_updates": 1_000_000}],
    }  # fmt: skip
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    write_run(tmp_path / "run", "RTE", 2e-5, 1, 60.0, pretrained=str(tmp_path / "checkpoint.pt"))
    found = collect([tmp_path])
    judged = pretraining([key[0] for key in found.runs])
    assert list(judged.values()) == [pytest.approx((loss * math.log(2), entropy))]
    page = write_report(found, tmp_path / "report", pretrained=judged).read_text()
    assert f"<td>{entropy:.3f}</td><td>{verdict}" in page
    assert f"| **{entropy:.3f}** | **{verdict}" in (tmp_path / "report" / "report.md").read_text()
    torch.save({**checkpoint, "extra_state": {}}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="holds no validation loss"):
        pretraining([key[0] for key in found.runs])
    checkpoint["cfg"]["criterion"]["_name"] = "electra"  # its loss is another one
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    assert pretraining([key[0] for key in found.runs]) == {}
    torch.save({**checkpoint, "optimizer_history": [{"num_updates": 7}]}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="no longer the one that was fine-tuned, after 1000000 updates"):
        pretraining([key[0] for key in found.runs])


def test_several_checkpoints_of_a_run_give_the_pretraining_figure(tmp_path):
    for updates in (100_000, 300_000, 1_000_000):
        write_sweep(tmp_path / str(updates), ["MNLI", "RTE"], {2e-5: [60 + updates / 1e5]}, updates=updates)
    found = collect([tmp_path])
    pictures = report.pretraining_curves(summarise(found.runs, "best"))
    assert len(pictures) == 2 and all(svg.startswith("<?xml") for svg in pictures.values())
    assert "Score against pre-training" in write_report(found, tmp_path / "report").read_text()
    # Another run of the same architecture is another line, and told by its folder.
    for updates in (300_000, 1_000_000):
        write_sweep(
            tmp_path / "b" / str(updates), ["MNLI", "RTE"], {2e-5: [50]}, updates=updates, pretrained="/runs/b/x.pt"
        )
    both = collect([tmp_path])
    assert len({key[0] for key in both.runs}) == 5
    assert {key[0].name for key in both.runs} == {"tupe_r [.]", "tupe_r [b]"}
    only = {key: run for key, run in found.runs.items() if key[0].updates == 100_000}
    assert report.pretraining_curves(summarise(only, "best")) == {}


def test_correlations_of_properties_with_scores(tmp_path):
    for name, value in (("bert_a", 70.0), ("bert_r", 72.0), ("tupe_a", 75.0)):
        write_run(tmp_path / name, "RTE", 2e-5, 1, value, architecture=name)
    found = collect([tmp_path])
    summaries = summarise(found.runs, "best")
    measured = {model: {"up": i, "same": 1.0, "unknown": float("nan")} for i, model in enumerate(sorted(summaries))}
    header, rows = correlations(measured, summaries)
    assert header == ["property", "RTE accuracy"]
    expected = np.corrcoef([0, 1, 2], [70, 72, 75])[0, 1]
    assert [cells for _, cells in rows] == [["up", f"{expected:+.2f}"], ["same", ""], ["unknown", ""]]
    # A model without position encoding takes no part, whatever it scores.
    nopos = Model("bert_a", 7, "/runs/nopos.pt", "position nopos")
    assert (
        correlations(
            {**measured, nopos: {"up": 9, "same": 9.0, "unknown": 9.0}}, {**summaries, nopos: summaries[min(summaries)]}
        )[1]
        == rows
    )
    two = dict(list(measured.items())[:2])
    assert correlations(two, summaries)[1][0][1] == ["up", ""]
    # With a second task, the mean of both is a score as well.
    for name, value in (("bert_a", 60.0), ("bert_r", 80.0), ("tupe_a", 50.0)):
        write_run(tmp_path / f"{name}_2", "SST-2", 2e-5, 1, value, architecture=name)
    header, rows = correlations(measured, summarise(collect([tmp_path]).runs, "best"))
    assert header[1].startswith("mean of 2")
    assert rows[0][1][1] == f"{np.corrcoef([0, 1, 2], [65, 76, 62.5])[0, 1]:+.2f}"
    page = write_report(found, tmp_path / "report", measured).read_text()
    assert "Properties of the position encodings" in page and f"{expected:+.2f}" in page
    page = write_report(found, tmp_path / "report", two).read_text()
    assert "Properties of the position encodings" in page and "Pearson correlation" not in page


@pytest.mark.parametrize("output, options, said", [("report", ["--properties"], "moved.pt"), ("file", [], "file")])
def test_files_that_cannot_be_read_or_written_are_named(tmp_path, monkeypatch, capsys, output, options, said):
    write_run(tmp_path / "run", "RTE", 2e-5, 1, 70.0, pretrained=str(tmp_path / "moved.pt"))
    (tmp_path / "file").touch()
    script = str(Path(__file__).parents[2] / "scripts" / "collect.py")
    monkeypatch.setattr("sys.argv", [script, str(tmp_path / "run"), "--output", str(tmp_path / output), *options])
    with pytest.raises(SystemExit):
        runpy.run_path(script, run_name="__main__")
    assert f"{tmp_path}/{said}" in capsys.readouterr().err


def test_question_answering_runs_are_in_the_table_of_all_scores(tmp_path):
    write_run(tmp_path / "run", "RTE", 2e-5, 1, 70.0)
    result = json.loads((tmp_path / "run" / "scores.json").read_text())
    result.update(task="SQuAD-2.0", metrics=["f1", "exact"])
    for record in result["records"]:
        record.update(f1=61.25, exact=58.5)
    (tmp_path / "run" / "scores.json").write_text(json.dumps(result))
    page = write_report(collect([tmp_path]), tmp_path / "report").read_text()
    assert "SQuAD&#8209;2.0 f1" in page and "61.25" in page and "58.50" in page
