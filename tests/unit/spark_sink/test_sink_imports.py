"""Who does not use Spark pays nothing for the sink."""

from __future__ import annotations

import subprocess
import sys


def test_library_imports_neither_sink_nor_its_dependencies() -> None:
    heavy = ("fencepost.spark", "pyspark", "pyarrow", "numpy")
    code = f"import fencepost, sys; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
