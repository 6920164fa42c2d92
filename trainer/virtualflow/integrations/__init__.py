"""Training loops of other libraries, run over virtual nodes: a module each, named after the library, which needs it.
Data of other libraries, read as shards of virtual nodes. Also what makes a checkpoint into files of
theirs (``export``).

They call what a script may call, and what a worker offers to them alone. Nothing else may import them.
"""

from virtualflow._imports import own_imports

with own_imports():
    import virtualflow.worker.entry  # all of it, before a module here asks for parts
