"""Factors of the learning rate after so many updates, the same for both engines."""


def polynomial(done: int, warmup: float, total: float, lr: float, end: float = 0.0, power: float = 1.0) -> float:
    """fairseq's `polynomial_decay`: it rises to 1 in `warmup` updates, then falls to `end` / `lr` until `total`."""
    if not lr:
        return 0.0
    if warmup > 0 and done <= warmup:
        return done / warmup  # 0 in the first update
    if done >= total:
        return end / lr
    return ((lr - end) * (1 - (done - warmup) / (total - warmup)) ** power + end) / lr


def constant(done: int, warmup: int, cooldown: int, total: int) -> float:
    """It rises to 1 in `warmup` updates, is 1, and falls to 0 in the last `cooldown` of all `total`."""
    if done < warmup:
        return max(done, 1) / warmup
    return max(total - done, 0) / cooldown if total - done < cooldown else 1.0
