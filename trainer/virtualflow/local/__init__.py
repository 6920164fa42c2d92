"""A job as processes of this machine: what ``virtualflow run`` does. It needs no torch."""
