"""BabyLM's track: what becomes of its folder, and that both arms of the comparison get the same text."""

import json
import shutil

import pytest
from click.testing import CliRunner

from lab import babylm
from tupe.data.splits import Split
from tupe.text import TextEncoder

SPOKEN = ["Well, you know the cat sat there.", "Did it?", "  ", "Yes — on the mat!", "Café au lait, s'il te plaît."]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Data of a folder as the track has it: files of lines, some of them empty, without borders of documents."""
    folder = tmp_path_factory.mktemp("babylm")
    (folder / "train_10M").mkdir()
    for name in ("childes", "switchboard"):
        lines = [f"{name} {i} {line}" if line.strip() else line for i in range(900) for line in SPOKEN]
        (folder / "train_10M" / f"{name}.train").write_text("\n".join(lines), encoding="utf-8")
    words = [str(folder / "train_10M"), "--vocab-size", "400", "--output", str(folder / "out")]
    result = CliRunner().invoke(babylm.prepare, words)
    assert result.exit_code == 0, result.output
    return folder / "out" / "data"


def test_every_line_is_a_sequence_and_a_part_of_every_file_is_held_out(prepared):
    encoder = TextEncoder(prepared)
    lines = {split: [encoder.decode(ids) for ids in Split(prepared / split) if len(ids) > 1]
             for split in ("train", "valid")}  # fmt: skip
    expected = [f"{name} {i} {line}" for name in ("childes", "switchboard") for i in range(900)
                for line in SPOKEN if line.strip()]  # fmt: skip
    assert sorted(lines["train"] + lines["valid"]) == sorted(expected)
    for name in ("childes", "switchboard"):
        share = sum(line.startswith(name) for line in lines["valid"]) / (len(expected) / 2)
        assert 0 < share < 0.2


def test_run_mlm_gets_the_same_text_and_ids(prepared, tmp_path):
    from transformers import AutoTokenizer

    babylm.write_for_run_mlm(prepared, tmp_path)
    tokenizer, split = AutoTokenizer.from_pretrained(tmp_path / "tokenizer"), Split(prepared / "train")
    ours = [[0, *ids.tolist()] for ids in split if len(ids) > 1]
    theirs = [tokenizer(line)["input_ids"] for line in (tmp_path / "train.txt").read_text().splitlines()]
    assert theirs == ours
    assert tokenizer.pad_token_id == babylm.PAD and tokenizer.mask_token == "<mask>"


def test_documents_end_after_so_many_words(monkeypatch):
    monkeypatch.setattr(babylm, "WORDS_OF_A_DOCUMENT", 3)
    assert babylm.with_documents(["a b", "", "c d", "e", "f g"]) == "a b\nc d\n\ne\nf g\n\n"


def test_the_sample_has_so_many_words_and_refuses_more(tmp_path):
    raw = tmp_path / "raw"
    for source in ("books", "speeches"):
        (raw / source).mkdir(parents=True)
        (raw / source / "one.txt").write_text("It was\na night. It rained.\n\nThe end.\n")
    (raw / "reviews").mkdir()
    (raw / "reviews" / "imdb.jsonl").write_text(json.dumps({"text": "Good. Bad."}) + "\n")
    words = ["--raw", str(raw), "--output", str(tmp_path / "train"), "--words"]
    assert CliRunner().invoke(babylm.sample, [*words, "9"]).exit_code == 0
    assert (tmp_path / "train" / "books.train").read_text() == "It was a night.\nIt rained.\nThe end.\n"
    assert (tmp_path / "train" / "speeches.train").read_text() == "It was a night.\n"
    result = CliRunner().invoke(babylm.sample, [*words, "30"])
    assert result.exit_code == 2 and "--words 18 or fewer" in result.output


def test_what_is_there_is_not_trained_again_and_the_page_has_it(prepared, tmp_path, monkeypatch):
    """An interrupted comparison goes on behind its last training. The page has a mean where all seeds have ended, and
    says what is missing."""
    trained, script = [], tmp_path / "run_mlm.py"
    script.touch()

    def train(run, data, output, python, script):
        trained.append(run)
        run.folder(output).mkdir()
        return {"cpu_seconds": 600, "seconds": 700} if run.seed < 3 else {"cpu_seconds": None, "seconds": None}

    def score(folder, data, pairs):
        if folder.name == "run_mlm_seed3":
            raise ValueError("interrupted")
        seed = int(folder.name[-1])
        return {"bits": 7.0 + seed, "blimp": 0.5 + seed / 100, "blimp_error": 0.005, "phenomena": {}}

    monkeypatch.setattr(babylm, "train", train)
    monkeypatch.setattr(babylm, "score", score)
    monkeypatch.setattr(babylm, "ROWS", tmp_path / "evidence" / "runs.csv")
    words = ["--data", prepared, "--pairs", tmp_path, "--script", script, "--python", "python", "--output"]
    words = [*map(str, words), str(tmp_path / "runs")]
    for _ in range(2):
        assert CliRunner().invoke(babylm.compare, words).exit_code == 2
    assert len(trained) == len(set(trained)) == 6

    page = tmp_path / "page.md"
    page.write_text("# A page\n\n## Results\n\nNo run.\n")
    monkeypatch.setattr(babylm, "PAGE", page)
    assert CliRunner().invoke(babylm.write_page, ["--runs", str(tmp_path / "runs")]).exit_code == 0
    text = page.read_text()
    assert text.startswith("# A page\n\n## Results\n") and "No run." not in text
    assert "| tupe_r | mean, s.d. | 9.00, 1.00 | 52.0, 1.0 |" in text and "run_mlm | mean" not in text
    assert "| tupe_r | 3 | 10.00 | 53.0 ± 0.5 | interrupted |" in text and "not finished: 1 of six" in text
    assert CliRunner().invoke(babylm.write_page).exit_code == 0 and page.read_text() == text
    assert "No run has finished" in babylm.results([])
    rows = [{"arm": arm, "seed": str(n), "bits": 7 + n / 10 + 2 * (arm == "run_mlm"), "blimp": 0.5 + n / 100,
             "blimp_error": 0.005, "cpu_seconds": 60} for arm in babylm.ARMS for n in (1, 2, 3)]  # fmt: skip
    # of 3 and 3 seeds of one deviation s, the half is 2.776 s sqrt(2 / 3)
    assert "-2.00 [-2.23, -1.77] bits and +0.0 [-2.3, 2.3] points" in babylm.results(rows)

    trained.clear()  # a fresh folder has its own runs, whatever the committed rows are
    assert CliRunner().invoke(babylm.compare, [*words[:-1], str(tmp_path / "fresh")]).exit_code == 2
    assert len(trained) == 6
    shutil.copytree(prepared, tmp_path / "other")
    (tmp_path / "other" / "dict.txt").write_text("other 1\n")
    result = CliRunner().invoke(babylm.compare, ["--data", str(tmp_path / "other"), *words[2:]])
    assert result.exit_code == 2 and "has runs on other data" in result.output
