"""What goes over a wire or through an environment, typed, and the rules that both ends of it follow.

Messages between workers and the coordinator, the HTTP calls of those who signal or watch a job, environment variables,
profile files, termination messages, signatures of checkpoints; which generation may follow another (``lineage``), what
a crash counts for (``crashes``), and which errors tell of a machine (``machine_faults``). The whole library and the
operator may import it; it imports the errors and the version alone, and never torch. Each module is a vocabulary of its
own, so names are imported from the modules.
"""
