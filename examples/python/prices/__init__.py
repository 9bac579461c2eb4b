"""Prices with tax, in cents."""


def gross(net: int, percent: int) -> int:
    """Return the price with tax, rounded half up."""
    if net < 0 or percent < 0:
        raise ValueError("prices and taxes are not negative")
    return (net * (100 + percent) + 50) // 100
