"""`fencepost check`."""
