"""Sockets: listeners, proxied connections, TLS, certificates."""
