"""Factors of the learning rate after so many updates, the same for both engines."""


def polynomial(done: int, warmup: float, total: float) -> float:
    """fairseq's `polynomial_decay` as all recipes have it: it rises to 1 in `warmup` updates, and falls to 0 until
    `total`."""
    if warmup > 0 and done <= warmup:
        return done / warmup  # 0 in the first update
    return 1 - (done - warmup) / (total - warmup) if done < total else 0.0


def check_constant(warmup: int, cooldown: int, total: int) -> None:
    """Raise ValueError for a warm-up and a cool-down that are longer than the run together."""
    if warmup + cooldown > total:
        raise ValueError(f"{warmup} updates of warm-up and {cooldown} of cool-down: valid: at most {total} in all")


def constant(done: int, warmup: int, cooldown: int, total: int) -> float:
    """It rises to 1 in `warmup` updates, is 1, and falls to 0 in the last `cooldown` of all `total`."""
    if done < warmup:
        return max(done, 1) / warmup
    return max(total - done, 0) / cooldown if cooldown and total - done < cooldown else 1.0
