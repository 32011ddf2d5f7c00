"""Blocks against fairseq's, cuts of long sentences, and borders that stay on the disk."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import split_documents, write_data

from tupe.data import blocks as module
from tupe.data.blocks import EOS, Blocks, borders_of, cut_long
from tupe.data.splits import Split, prefixes_of, read_symbols, write_split

LENGTH = 20


@pytest.fixture(scope="module", params=["lines", "documents"])
def folder(request, tmp_path_factory):
    folder = write_data(tmp_path_factory.mktemp(request.param) / "data", lines=200)
    if request.param == "documents":
        split_documents(folder)
    return folder


def stock_blocks(folder, length, split="train"):
    """Those of fairseq's `masked_lm`."""
    pytest.importorskip("fairseq")
    from fairseq.tasks.masked_lm import MaskedLMConfig, MaskedLMTask
    from omegaconf import OmegaConf

    config = {"data": str(folder), "tokens_per_sample": length, "sample_break_mode": "complete", "seed": 3}
    config = OmegaConf.merge(OmegaConf.structured(MaskedLMConfig), {"shorten_data_split_list": "", **config})
    blocks = MaskedLMTask.setup_task(config)._load_dataset_split(split, 1, False)
    return [blocks[i].tolist() for i in range(len(blocks))]


def test_blocks_of_sentences_that_fit_are_fairseqs(folder):
    theirs = [block for block in stock_blocks(folder, 64) if set(block[1:]) != {EOS}]
    ours = Blocks(folder / "train", 64, read_symbols(folder))
    assert [block.tolist() for block in ours] == theirs and len(ours) > 1
    assert ours.sizes.tolist() == [len(block) for block in theirs]


@pytest.mark.parametrize("length", [6, LENGTH])
def test_no_text_is_lost_where_sentences_are_cut(folder, length):
    text = Split(folder / "train").tokens
    blocks = [block.tolist() for block in Blocks(folder / "train", length, read_symbols(folder))]
    assert max(map(len, blocks)) <= length and all(block[0] == 0 and set(block[1:]) - {EOS} for block in blocks)
    assert [t for block in blocks for t in block[1:] if t != EOS] == text[text != EOS].tolist()


@pytest.mark.parametrize("chunk", [1, 7])
@pytest.mark.parametrize("length", [6, 64])
def test_borders_do_not_depend_on_how_many_sentences_are_looked_at(folder, length, chunk, monkeypatch):
    whole = [block.tolist() for block in Blocks(folder / "train", length, read_symbols(folder))]
    monkeypatch.setattr(module, "CHUNK", chunk)
    assert [block.tolist() for block in Blocks(folder / "train", length, read_symbols(folder))] == whole


@pytest.mark.parametrize("marks", [["▁a", "b"], ["a", "##b", "##c"]])
def test_long_sentences_are_cut_where_words_begin(marks):
    begin, go_on = 4, 5
    symbols, rng = ["<s>", "<pad>", "</s>", "<unk>", *marks], np.random.default_rng(0)
    for room in (2, 3, 8):
        lengths = rng.integers(room + 3, size=40)
        words = [[begin, *[go_on] * n] for n in lengths]
        lines = [np.array([*sum(words[i : i + 5], []), EOS]) for i in range(0, 40, 5)] + [np.array([EOS])]
        sizes = cut_long(np.array([len(line) for line in lines]), lines.__getitem__, room, symbols)
        parts = [part.tolist() for part in np.split(np.concatenate(lines), np.cumsum(sizes)[:-1])]
        assert max(sizes) <= room and {*np.cumsum([*map(len, lines)])} <= {*np.cumsum(sizes)}
        assert sum(size == 1 for size in sizes) - 1 == sum(part in ([4], [5]) for part in parts)
        for before, after in zip(parts, parts[1:], strict=False):  # no more would have fitted, or it is between words
            assert before[-1] == EOS or after[0] == begin or len(before) >= room - 1, (before, after)


def test_blocks_without_text_are_left_out(tmp_path):
    write_split(tmp_path / "train", [[5] * 7 + [EOS], [EOS], [6] * 7 + [EOS], [EOS], [7, EOS], [EOS]], 9)
    symbols = ["<s>", "<pad>", "</s>", "<unk>", "a", "b", "c", "d", "<mask>"]
    assert [b.tolist() for b in Blocks(tmp_path / "train", 9, symbols)] == [
        [0, *[5] * 7, EOS], [0, *[6] * 7, EOS], [0, EOS, 7, EOS, EOS]
    ]  # fmt: skip


@pytest.fixture
def large(monkeypatch):
    """Any split is one whose borders are kept on the disk."""
    monkeypatch.setattr(module, "SMALL", 0)


def test_borders_on_the_disk(folder, large, monkeypatch, tmp_path):
    """They are written once, mapped by all, and found anew for other data and another length."""
    symbols, split = read_symbols(folder), Split(folder / "train")
    monkeypatch.setattr(module, "CHUNK", 50)
    found = borders_of(split, LENGTH - 1, symbols)
    file = folder / f"train.blocks-{LENGTH}"
    assert isinstance(found, np.memmap) and file.is_file() and not Path(f"{file}.lock").exists()
    with monkeypatch.context() as patch:
        patch.setattr(module, "find_borders", None)  # it is not called again
        assert (borders_of(split, LENGTH - 1, symbols) == found).all()
    os.utime(folder / "train.bin", ns=(1, 1))
    content, inode = file.read_bytes(), file.stat().st_ino
    assert (borders_of(split, LENGTH - 1, symbols) == found).all()
    assert file.read_bytes() != content and file.read_bytes()[32:] == content[32:] and file.stat().st_ino != inode
    assert len(borders_of(split, 8, symbols)) > len(found)
    assert {path.name for path in folder.glob("*blocks*")} == {file.name, "train.blocks-9"}
    for path in folder.glob("*blocks*"):
        path.unlink()


def test_a_folder_that_cannot_be_written(folder, large, monkeypatch):
    expected = [block.tolist() for block in Blocks(folder / "train", LENGTH, read_symbols(folder))]
    (folder / f"train.blocks-{LENGTH}").unlink()

    def refuse(*arguments):
        raise PermissionError

    monkeypatch.setattr(module, "_write_beside", refuse)
    blocks = Blocks(folder / "train", LENGTH, read_symbols(folder))
    assert [block.tolist() for block in blocks] == expected and isinstance(blocks.borders[0], np.memmap)
    assert not [*folder.glob("*blocks*")]


def test_one_of_several_processes_writes_the_borders(folder):
    """The others wait for it, and a half file of one that was killed is written anew."""
    Path(folder / f"train.blocks-{LENGTH}.7.partial").write_bytes(b"half")
    program = f"""
import sys
from tupe.data import blocks
from tupe.data.splits import read_symbols
blocks.SMALL, write = 0, blocks._write
def told(*arguments):
    print("wrote")
    write(*arguments)
blocks._write = told
print(blocks.Blocks(sys.argv[1] + "/train", {LENGTH}, read_symbols(sys.argv[1])).borders[0].tolist())
"""
    command = [sys.executable, "-c", program, str(folder)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate()[0].splitlines() for process in running]
    assert len({lines[-1] for lines in said}) == 1 and sum("wrote" in lines for lines in said) == 1
    path = folder / f"train.blocks-{LENGTH}"
    module._write_beside(path, path.read_bytes()[: module.KEY], iter(()))  # one that comes when the writer ends
    assert [*folder.glob("*blocks*")] == [path]
    path.unlink()


def test_several_splits_are_one_after_the_other(tmp_path):
    one, two = (write_data(tmp_path / name, lines=lines) for name, lines in (("a", 50), ("b", 30)))
    prefixes = prefixes_of(f"{one}:{two}", "train")
    assert prefixes == [f"{one}/train", f"{two}/train"]
    assert prefixes_of(f"{one}:{two}", "valid") == [f"{one}/valid"]
    symbols, parts = read_symbols(one), []
    for prefix in prefixes:
        parts += [block.tolist() for block in Blocks(prefix, LENGTH, symbols)]
    whole = Blocks(prefixes, LENGTH, symbols)
    assert [whole[i].tolist() for i in range(len(whole))] == parts and whole.sizes.tolist() == [*map(len, parts)]
    with (two / "dict.txt").open("a") as file:
        file.write("more 1\n")
    with pytest.raises(ValueError, match="b was prepared with another vocabulary than .*a: their dict.txt differ"):
        prefixes_of(f"{one}:{two}", "train")


def test_errors_name_what_is_wrong(tmp_path, folder):
    with pytest.raises(ValueError, match="data folder not found"):
        read_symbols(tmp_path / "nothing")
    with pytest.raises(ValueError, match="has no dict.txt"):
        read_symbols(tmp_path)
    (tmp_path / "dict.txt").write_text("word\n")
    with pytest.raises(ValueError, match="'word' is not a symbol and its count"):
        read_symbols(tmp_path)
    with pytest.raises(ValueError, match="has no split 'test'"):
        Blocks(folder / "test", LENGTH, read_symbols(folder))


def test_data_that_is_cut_under_a_run_is_named(folder):
    """Reading what is gone from a mapped file would end the process without a word."""
    blocks = Blocks(folder / "train", LENGTH, read_symbols(folder))
    blocks[0]
    content = (folder / "train.bin").read_bytes()
    os.truncate(folder / "train.bin", len(content) // 2)
    with pytest.raises(ValueError, match=r"train.bin has [\d,]+ bytes, and had [\d,]+ when this began"):
        blocks[len(blocks) - 1]
    (folder / "train.bin").write_bytes(content)
    blocks[len(blocks) - 1]
