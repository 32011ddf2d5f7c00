"""Checkpoint files: averaging, stripping, merging."""

import pytest
import torch
from click.testing import CliRunner
from helpers import our_checkpoint

from tupe.checkpoints import files as checkpoints
from tupe.checkpoints import swap
from tupe.checkpoints.files import average_command, merge_command, strip_command
from tupe.checkpoints.stretch import command as stretch_command
from tupe.checkpoints.swap import command as swap_command
from tupe.checkpoints.trained import read_model
from tupe.cli import main
from tupe.common.safe_load import num_updates


def run(command, *arguments):
    """What a command prints."""
    result = CliRunner().invoke(command, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.output


def test_average_of_the_last(tmp_path):
    for number, value in enumerate([100.0, 1.0, 2.0, 6.0]):
        our_checkpoint(tmp_path / f"checkpoint_1_{number + 8}.pt", value, number + 8)
    (tmp_path / "checkpoint_last.pt").write_bytes((tmp_path / "checkpoint_1_11.pt").read_bytes())
    paths = checkpoints.newest(tmp_path, 3)
    assert [num_updates(torch.load(path, weights_only=True)) for path in paths] == [9, 10, 11]
    mean = checkpoints.average(paths)
    floats = [value for value in mean.weights.values() if value.is_floating_point()]
    assert floats and all(value.eq(3).all() for value in floats)
    run(average_command, "--last", 3, tmp_path, "--output", tmp_path / "mean.pt")
    written = torch.load(tmp_path / "mean.pt", weights_only=True)
    assert all(torch.equal(written["model"][key], value) for key, value in mean.weights.items())
    assert written["last_optimizer_state"] is None and written["extra_state"]["averaged"] == 3
    torch.save({**written, "optimizer_history": [{"num_updates": 12}]}, tmp_path / "checkpoint_averaged.pt")
    assert checkpoints.newest(tmp_path, 3) == paths
    last = torch.load(paths[-1], weights_only=True)["model"]
    settings = [key for key in last if key.endswith("_extra_state")]
    assert settings and all(torch.equal(mean.weights[key], last[key]) for key in settings)
    with pytest.raises(ValueError, match="4, not 5"):
        checkpoints.newest(tmp_path, 5)
    torch.save({**written, "fsdp_metadata": {}}, tmp_path / "checkpoint_1_9-shard0.pt")
    with pytest.raises(ValueError, match="shard0.pt is a part of a checkpoint; `tupe checkpoint merge`"):
        checkpoints.newest(tmp_path, 3)
    other = our_checkpoint(tmp_path / "other.pt", 1.0, 1, types=13)
    with pytest.raises(ValueError, match=r"another model .* encoder\.tokens\.weight"):
        checkpoints.average([paths[0], other])


def test_strip_command_prints_sizes(tmp_path):
    path, small = our_checkpoint(tmp_path / "checkpoint_last.pt", 1.0, 3), tmp_path / "small.pt"
    printed = run(strip_command, path, "--output", small)
    sizes = [path.stat().st_size, small.stat().st_size]
    assert sizes[0] - sizes[1] > 70000 and f"{sizes[0]:,}" in printed and f"{sizes[1]:,}" in printed
    before, after = (torch.load(p, weights_only=True) for p in (path, small))
    assert after["last_optimizer_state"] is None
    assert all(torch.equal(after["model"][key], value) for key, value in before["model"].items())


@pytest.mark.parametrize(
    "command, words",
    [
        (average_command, ["{path}", "{path}"]), (strip_command, ["{path}"]), (merge_command, ["{path}"]),
        (swap_command, ["--checkpoint={path}", "--position=t5", "--data={path.parent}"]),
        (stretch_command, ["--checkpoint={path}", "--length=9"]),
    ],
)  # fmt: skip
def test_nothing_is_overwritten_and_weights_are_finite(command, words, tmp_path, monkeypatch):
    path = our_checkpoint(tmp_path / "a.pt", 1.0, 3)
    state = torch.load(path, weights_only=True)
    monkeypatch.setattr(checkpoints, "merge_shards", lambda paths: read_model(paths[0]))
    monkeypatch.setattr(swap, "check_dictionary", lambda *arguments: None)
    monkeypatch.setattr(swap, "swap_position", lambda trained, *options: trained)
    (tmp_path / "dict.txt").touch()

    def refused(output):
        arguments = [word.format(path=path) for word in words]
        result = CliRunner().invoke(command, [*arguments, f"--output={output}"])
        assert result.exit_code == 2 and result.output.count("\n") == 1, result.output
        return result.output

    before = path.read_bytes()
    assert f"{path} exists already; choose another file" in refused(path) and path.read_bytes() == before
    state["model"]["encoder.tokens.weight"][3] = float("nan")
    torch.save(state, path)
    assert "NaN or infinite, in encoder.tokens.weight" in refused(tmp_path / "new.pt")
    assert not (tmp_path / "new.pt").exists()


def test_shards_are_merged(tmp_path):
    whole = torch.load(our_checkpoint(tmp_path / "whole.pt", 1.0, 3), weights_only=True)
    generator = torch.Generator().manual_seed(0)
    model = {
        k: torch.rand(v.shape, generator=generator) if v.is_floating_point() else v for k, v in whole["model"].items()
    }
    # What fairscale writes for a root module with one wrapped layer, over 3 processes: flat, padded, cut.
    groups = {"": [], "encoder.layers.0": []}
    for key, value in model.items():
        if value.is_floating_point():
            groups["encoder.layers.0" if key.startswith("encoder.layers.0.") else ""].append(key)
    shards = [{"model": {k: v for k, v in model.items() if not v.is_floating_point()}} for _ in range(3)]
    described = [[] for _ in range(3)]
    for path, keys in groups.items():
        prefix = path + "." if path else ""
        flat = torch.cat([model[key].flatten() for key in keys])
        padding = -len(flat) % 3
        parts = torch.nn.functional.pad(flat, (0, padding)).chunk(3)
        for rank in range(3):
            shards[rank]["model"][prefix + "flat_param_0"] = parts[rank]
            facts = {
                "names": [key[len(prefix) :] for key in keys],
                "shapes": [model[key].shape for key in keys],
                "numels": [model[key].numel() for key in keys],
                "padding": padding if rank == 2 else 0,
            }
            shared = {"fsdp_path": path, "no_broadcast_optim_state": False, "shared_param_info": []}
            described[rank].append({**shared, "params": {"flat_param_0": facts}})
    paths = []
    for rank in range(3):
        state = {**whole, **shards[rank], "fsdp_metadata": {"param_metadata": described[rank], "buffer_names": []}}
        paths.append(tmp_path / f"checkpoint_last-shard{rank}.pt")
        torch.save(state, paths[-1])
    merged = checkpoints.merge_shards(paths)
    assert merged.weights.keys() == model.keys()
    assert all(torch.equal(merged.weights[key], value) for key, value in model.items())
    run(merge_command, *reversed(paths), "--output", tmp_path / "merged.pt")
    written = torch.load(tmp_path / "merged.pt", weights_only=True)["model"]
    assert all(torch.equal(written[key], value) for key, value in model.items())
    for wrong in (paths[:2], [*paths, paths[0]]):
        with pytest.raises(ValueError, match="missing, or one given twice"):
            checkpoints.merge_shards(wrong)
    torch.save({**state, "optimizer_history": [{"num_updates": 4}]}, paths[-1])
    with pytest.raises(ValueError, match=r"different numbers of updates .*shard0\.pt 3, .*shard2\.pt 4"):
        checkpoints.merge_shards(paths)
    with pytest.raises(ValueError, match="not a shard"):
        checkpoints.merge_shards([tmp_path / "whole.pt"])


@pytest.mark.parametrize(
    "words",
    ["export --checkpoint", "stretch --length=9 --checkpoint", "swap --position=rope --checkpoint",
     "convert --to=released --dict={0}/dict.txt --from", "convert --to=modernbert --dict={0}/dict.txt --from"],
)  # fmt: skip
def test_another_model_of_fairseq_is_refused(words, tmp_path):
    state = {"cfg": {"model": {"_name": "roberta"}, "task": {}}, "model": {"encoder.weight": torch.ones(1)}}
    torch.save(state, tmp_path / "roberta.pt")
    (tmp_path / "dict.txt").write_text("a 1\n")
    command = ["checkpoint", *words.format(tmp_path).split(), f"{tmp_path / 'roberta.pt'}", f"--output={tmp_path}/out"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 2 and "roberta.pt is no checkpoint of this project" in result.output, result.output
    assert not (tmp_path / "out").exists()
