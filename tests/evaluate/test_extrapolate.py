"""Loss at longer lengths: which tokens are scored, the loss against a plain computation, and the command."""

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from helpers import build_masked_lm, pretrain_arguments, train, write_data

from tupe.evaluate.extrapolate import Loss, command, draw_windows, extrapolation, tabulate, window_losses

N, M = 10, 40


@pytest.fixture(scope="module")
def stream():
    return np.random.default_rng(0).integers(4, 54, 400)


def model(position, **options):
    model = build_masked_lm("bert_a_tiny", 55, position=position, **{"max_positions": N, "layers": 1, **options})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def test_windows(stream):
    words, masked = draw_windows(stream, N, M, 20)
    begin = (M - N) // 2
    assert words.shape == masked.shape == (20, M - 2)
    assert (masked[:, begin : begin + N - 2].sum(1) == 1).all() and masked[:, :begin].any()
    middles = words[:, begin : begin + N - 2]
    places = [stream.tobytes().find(row.tobytes()) // 8 for row in middles]
    assert all(b - a >= N - 2 for a, b in zip(places, places[1:], strict=False))  # no token is scored twice
    assert places[0] == begin and places[-1] > len(stream) - M  # from the first to the last word
    assert np.array_equal(masked, draw_windows(stream, N, M, 20)[1])
    with pytest.raises(ValueError, match="46 windows of 40 tokens, fewer than 47; valid here: --windows 46 or fewer"):
        draw_windows(stream, N, M, 47)
    with pytest.raises(ValueError, match="fewer than 2; valid here: smaller --lengths$"):
        draw_windows(stream, N, len(stream), 2)


@pytest.mark.parametrize("length", [N, M])
def test_losses_are_those_of_one_sequence_at_a_time(stream, length):
    ours, drawn = model("t5"), draw_windows(stream, N, M, 6)
    begin, expected = (M - length) // 2, []
    for words, masked in zip(*drawn, strict=True):
        ids = [54 if hidden else word for word, hidden in zip(words.tolist(), masked, strict=True)]
        with torch.no_grad():
            logits = ours(torch.tensor([[0, *ids[begin : begin + length - 2], 2]])).logits[0]
        (place,) = (M - N) // 2 + np.flatnonzero(masked[(M - N) // 2 :][: N - 2])
        expected.append(F.cross_entropy(logits[1 + place - begin], torch.tensor(words[place])).item() / math.log(2))
    np.testing.assert_allclose(window_losses(ours, drawn, N, length, batch_tokens=3 * length), expected, rtol=1e-4)


def test_the_change_is_from_the_shortest_length(stream):
    ours, drawn = model("t5"), draw_windows(stream, N, M, 20)
    near, far = (window_losses(ours, drawn, N, length) for length in (N, M))
    loss = extrapolation(ours, stream, [M, N], 20)[1]
    assert loss.length == M and loss.mean == pytest.approx(far.mean())
    assert loss.difference == pytest.approx((far - near).mean())
    assert loss.difference_error == pytest.approx((far - near).std(ddof=1) / 20**0.5) and abs(loss.difference) > 1e-3


def test_a_table_of_positions_ends_where_it_ends(stream):
    lengths = [loss.length for loss in extrapolation(model("alibi"), stream, [M, N, 2 * N], 20)]
    assert lengths == [N, 2 * N, M]
    (only,) = extrapolation(model("absolute"), stream, [N, 2 * N, M], 20)
    assert only.length == N and only.difference == only.difference_error == 0 and only.error > 0
    with pytest.raises(ValueError, match="absolute has vectors for 10 positions, fewer than 20"):
        extrapolation(model("absolute"), stream, [2 * N], 20)


def test_table():
    losses = [Loss(8, 5.0, 0.1, 0.0, 0.0), Loss(16, 5.5, 0.1, 0.5, 0.05)]
    assert tabulate({"t5": losses, "absolute": losses[:1]}, [8, 16], 8).splitlines() == [  # t(7) = 2.365
        "| model | bits at 8 tokens | change at 16 |",
        "| --- | ---: | ---: |",
        "| t5 | 5.000 ± 0.236 | +0.500 ± 0.118 |",
        "| absolute | 5.000 ± 0.236 | – |",
    ]


def test_command(tmp_path):
    data = write_data(tmp_path / "data", valid_lines=60)
    options = ["--max-update=1", "--num-workers=0", "--encoder-layers=1", "--tokens-per-sample=12", "--position=t5"]
    train(pretrain_arguments(data, tmp_path / "run", *options, arch="bert_a_tiny"))
    words = [f"T5={tmp_path}/run/checkpoint_last.pt", "--lengths=12,48", "--windows=8", f"--output={tmp_path}/out"]
    result = CliRunner().invoke(command, words)
    assert result.exit_code == 0, result.output
    assert "| model | bits at 12 tokens | change at 48 |" in result.output
    content = json.loads((tmp_path / "out/extrapolation.json").read_text())
    assert [loss["length"] for loss in content["models"]["T5"]] == [12, 48]
    result = CliRunner().invoke(command, [*words[:1], "--lengths=12,12", f"--output={tmp_path}/out"])
    assert result.exit_code == 2 and "different whole numbers" in result.output
