"""A meeting of the ranks before they gather or spread: one that does something else is found there, and said."""

from __future__ import annotations

import torch

from drivetrain.cluster.control import Agreement, Call, Control


class Meeting:
    """Shows the other ranks that this one is about to gather parameters.

    On the CPU this rank waits for the others, as the gathering that follows would. Elsewhere the device waits, and
    this rank looks at the end of what it does.
    """

    def __init__(self, control: Control, *, device: torch.device) -> None:
        self._control = control
        self._waits = device.type == "cpu"
        self._agreement: Agreement | None = None

    def hold(self, call: Call) -> None:
        """Come to the meeting; collective.

        Raises:
            RankMismatchError: ranks are at different places.
        """
        if self._control.world_size > 1:
            self._agreement = self._control.start(call)
            if self._waits:
                self.end()

    def end(self) -> None:
        """See who else came, if that is not known yet."""
        agreement, self._agreement = self._agreement, None
        if agreement is not None:
            agreement.wait()
