"""`fencepost proxy` that writes what its partition sequencers do: one file in `$FENCEPOST_TRACES` for each.

A file is complete after each event, so that the process may be killed. Without the native module, whose appends by
permit reach no sequencer.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from pathlib import Path
from unittest.mock import patch

from fencepost_proxy.cli.main import main
from fencepost_proxy.session import dispatcher
from tests.specification.recorder import RecordingSequencer, Trace

DIRECTORY = "FENCEPOST_TRACES"
_numbers = itertools.count()


class WrittenTrace(Trace):
    def __init__(self) -> None:
        super().__init__()
        self._file = Path(os.environ[DIRECTORY], f"{os.getpid()}-{next(_numbers)}.json")

    def changed(self) -> None:
        undecided = [index for index, each in enumerate(self.events) if each in self.undecided.values()]
        fields = {"events": self.events, "sizes": self.sizes, "contents": self.contents, "undecided": undecided}
        part = self._file.with_suffix(".part")
        part.write_text(json.dumps({**fields, "named": sorted(self.named)}), "utf-8")
        part.replace(self._file)


if __name__ == "__main__":
    recorder = type("Recording", (RecordingSequencer,), {"recorded": [], "new_trace": WrittenTrace})
    with patch.object(dispatcher, "PartitionSequencer", recorder):
        sys.exit(main())
