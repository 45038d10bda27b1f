"""`make bench`: the product, the floor, other proxies and no proxy at all, measured in one interleaved run."""
