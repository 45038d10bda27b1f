"""`make bench`: the product, a plain TCP proxy, other proxies and direct connections, in one interleaved run."""
