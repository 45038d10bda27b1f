import fencepost_compiled

fencepost_compiled.use()
