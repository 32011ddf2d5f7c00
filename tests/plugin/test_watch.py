"""What a run is watched for, and what its progress is written to."""

import logging
import math
import re
import struct
import time
from unittest import mock

import pytest
from fairseq.logging import progress_bar
from fairseq.trainer import Trainer
from helpers import fork, pretrain_arguments, train
from tensorboardX.proto.event_pb2 import Event

from tupe.common.options import Refusal
from tupe.common.record import DIVERGED, STALLED, read, state_of
from tupe.plugin import watch, worker
from tupe.plugin.watch import IN_A_ROW, Watch


def arguments(data, folder, *more):
    return pretrain_arguments(data, folder, "--num-workers=0", "--max-update=8", *more)


def follow(losses, jump=0.0):
    """The number of losses that a watch takes, and the message with which it ends."""
    watched = Watch(0, jump, 0, lambda reason: None)
    for n, loss in enumerate(losses):
        try:
            watched.follow(loss)
        except FloatingPointError as error:
            return n, str(error)
    return len(losses), None


def test_losses_that_end_a_run():
    falling = [10 - n / 100 for n in range(500)]
    assert follow(falling, jump=0.5) == (500, None)
    assert follow([*falling, math.nan])[0] == 500 and "nan" in follow([*falling, math.nan])[1]
    assert follow([math.inf])[0] == 0
    assert follow([None] * (IN_A_ROW - 1) + [5.0] + [None] * (IN_A_ROW - 1)) == (2 * IN_A_ROW - 1, None)
    assert follow([5.0] + [None] * IN_A_ROW)[0] == IN_A_ROW
    # The running mean of the falling losses is about 1 behind the last, 5.01.
    jumped = [*falling, *[7.1] * 1000]
    assert follow(jumped) == follow(jumped, jump=1.2) == (1500, None)
    count, message = follow(jumped, jump=1.0)
    assert count == 500 + IN_A_ROW - 1 and "more than 1 above 5.99" in message
    assert follow([*falling, *[7.1, 5.0] * 500], jump=1.0) == (1500, None)  # it comes back


def test_time_left():
    watched = Watch(0, 0, 10_000, lambda reason: None)
    assert watched.time_left(5) is None
    with mock.patch.object(time, "monotonic", lambda: 1000.0):
        watched.begin(2000, 1)
    with mock.patch.object(time, "monotonic", lambda: 1600.0):
        assert watched.time_left(2000) is None and watched.time_left(2100) == "13:10:00"  # 6 s each
        assert watched.time_left(10_500) == "0:00:00"


def test_a_run_that_diverges_has_its_own_status(data, tmp_path):
    with pytest.raises(Refusal, match="training failed: FloatingPointError: ") as refusal:
        worker.train(worker.parsed([*arguments(data, tmp_path), "--lr=[1e38]"]))  # which `tupe` refuses
    assert refusal.value.exit_code == DIVERGED and state_of(tmp_path) == "failed"
    failure = read(tmp_path).failure
    assert failure["status"] == DIVERGED and failure["reason"].startswith("diverged: ")


def test_a_run_whose_loss_jumps(data, tmp_path, monkeypatch):
    """A rate that rises until the model is lost; without the option nobody minds."""
    monkeypatch.setattr(watch, "IN_A_ROW", 3)
    rising = ["--lr=[3]", "--warmup-updates=8"]
    assert len(train(arguments(data, tmp_path / "unwatched", *rising))) == 8
    with pytest.raises(FloatingPointError, match="3 updates in a row are more than 1 above"):
        train(arguments(data, tmp_path / "watched", *rising, "--stop-at-jump=1"))
    assert "the loss jumped" in read(tmp_path / "watched").failure["reason"]


def test_a_process_that_hangs_ends_itself(data, tmp_path):
    def run():
        with mock.patch.object(Trainer, "_reduce_and_log_stats", lambda *args: time.sleep(600)):
            worker.train(worker.parsed(arguments(data, tmp_path, "--heartbeat-timeout=1")))

    process = fork(run, "tupe")
    process.join()
    assert process.exitcode == STALLED and state_of(tmp_path) == "failed"
    assert re.fullmatch(r"no progress for 1 s, in <lambda> \(.*test_watch.py:\d+\)", read(tmp_path).failure["reason"])


def test_progress_lines_without_a_terminal_show_the_time_left(data, tmp_path, caplog, capfd):
    with caplog.at_level(logging.INFO):
        worker.train(worker.parsed(arguments(data, tmp_path, "--log-format=tqdm")))
    lines = [record.getMessage() for record in caplog.records if record.name == "train_inner"]
    assert len(lines) == 8 and all(re.search(r", left=0:00:\d\d", line) for line in lines[1:])
    written = capfd.readouterr()
    assert "\r" not in written.out + written.err and "it/s" not in written.out + written.err


def events(folder):
    """{(tag, step): value} of the scalars in a folder's event files, read as TFRecords."""
    scalars = {}
    for path in folder.glob("events*"):
        content = path.read_bytes()
        while content:
            (size,) = struct.unpack("<Q", content[:8])  # then a checksum of 4 bytes, the event, and another checksum
            event = Event.FromString(content[12 : 12 + size])
            content = content[16 + size :]
            scalars.update({(value.tag, event.step): value.simple_value for value in event.summary.value})
    return scalars


def test_tensorboard_gets_every_progress_line(data, tmp_path, monkeypatch):
    monkeypatch.setattr(progress_bar, "_tensorboard_writers", {})
    losses = train(arguments(data, tmp_path / "run", f"--tensorboard-logdir={tmp_path / 'board'}"))
    progress_bar._close_writers()  # as at the end of the process: they write in the background
    inner, valid = events(tmp_path / "board" / "train_inner"), events(tmp_path / "board" / "valid")
    shown = [value for (tag, _), value in sorted(inner.items()) if tag == "loss"]
    assert shown == pytest.approx([loss / math.log(2) for loss, _ in losses], abs=1e-3) and len(shown) == 8
    scores = {entry["num_updates"]: entry["loss"] for entry in read(tmp_path / "run").scores}
    assert {step: value for (tag, step), value in valid.items() if tag == "loss"} == pytest.approx(scores, abs=1e-3)


def test_weights_and_biases_gets_every_progress_line(data, tmp_path, monkeypatch):
    """A stand-in for the package."""
    wandb = mock.MagicMock()
    monkeypatch.setattr(progress_bar, "wandb", wandb)
    losses = train(arguments(data, tmp_path / "name", "--wandb-project=project"))
    assert wandb.init.call_args.kwargs == {"project": "project", "reinit": False, "name": "name"}
    shown = [call.args[0]["train_inner/loss"] for call in wandb.log.mock_calls if "train_inner/loss" in call.args[0]]
    assert shown == pytest.approx([loss / math.log(2) for loss, _ in losses], abs=1e-3)
