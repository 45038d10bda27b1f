"""Lets Spark find the format `fencepost` without `fencepost.spark.register`.

Spark imports each installed module with a name that starts with `pyspark_`, and registers its `DefaultSource`. An error
here would end every Spark program, also without Fencepost.
"""

import contextlib

with contextlib.suppress(ImportError):  # fencepost without its extra `spark`
    from fencepost.spark.datasource import FencepostDataSource as DefaultSource

__all__ = ["DefaultSource"]
