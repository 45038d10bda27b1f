# Before any module of this package: its source, or what was compiled of it?
import fencepost_compiled

fencepost_compiled.use()
