"""The scale of the loss in half precision. A resumed run takes over its counters, so that it grows and shrinks at the
same updates as in a run that was not stopped."""

from collections.abc import Callable

from fairseq.optim import FairseqOptimizer

COUNTERS = ("_iter", "_last_overflow_iter", "_last_rescale_iter", "_overflows_since_rescale")  # of fairseq's scaler


def state_dict(self: FairseqOptimizer, original: Callable) -> dict:
    """The state of an optimizer and of the scaler of its loss, of which fairseq keeps the scale of --fp16 alone."""
    state, scaler = original(self), self.scaler
    if hasattr(scaler, "state_dict"):  # torch's, of --amp
        state["loss_scaler"] = scaler.state_dict()
    elif scaler is not None:
        state["loss_scaler"] = {name: getattr(scaler, name) for name in COUNTERS}
    return state


def load_state_dict(
    self: FairseqOptimizer, state_dict: dict, optimizer_overrides: dict | None = None, *, original: Callable
) -> None:
    """Undoes `state_dict`; a checkpoint without the plugin has nothing of it."""
    saved, scaler = state_dict.get("loss_scaler"), self.scaler
    if saved and hasattr(scaler, "load_state_dict") and "scale" in saved:
        scaler.load_state_dict(saved)
    elif saved and scaler is not None and saved.keys() == {*COUNTERS}:
        vars(scaler).update(saved)
    original(self, state_dict, optimizer_overrides)
