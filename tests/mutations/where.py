"""Prints the place that the package is imported from, in this process and on a rank that is forked for it."""

from __future__ import annotations

import drivetrain
from drivetrain.testing import ranks


def place() -> str:
    return drivetrain.__file__


if __name__ == "__main__":
    print(place(), *ranks.run(place, ranks=1), sep="\n")
