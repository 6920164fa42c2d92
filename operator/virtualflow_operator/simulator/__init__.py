"""What the scheduling policies would do with a trace of jobs, in simulated time: the functions that the operator runs.

``trace`` reads files, ``simulation`` plays them, ``outcome`` says how well it went, and ``command`` is
``virtualflow simulate``, with its pictures. None of it needs a cluster, or the packages that talk to one.
"""
