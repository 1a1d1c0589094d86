"""Prints how long this interpreter takes for a short loop of calls, in microseconds.

`scripts/environment.sh` runs it with each Python that it finds.
"""

import time


class Total:
    def __init__(self) -> None:
        self.value = 0

    def add(self, *numbers: int, **named: int) -> None:
        if isinstance(numbers, tuple):
            self.value += len(numbers) + named["by"]


def work() -> None:
    total = Total()
    for number in range(50_000):
        total.add(number, by=1)


def seconds() -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


print(round(1e6 * min(seconds() for _ in range(5))))
