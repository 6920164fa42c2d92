"""Training loops of other libraries, run over virtual nodes: a module each, named after the library, which needs it.

They call what a script may call, and what a worker offers to them alone. Nothing else may import them.
"""
