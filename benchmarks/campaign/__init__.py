"""A campaign of faults against real jobs: what is cut off, slowed, stopped or broken is drawn from a seed.

``make campaign`` runs jobs of real processes in network namespaces of their own, and checks what each process has
written down about each step: one lineage, one leader a step, the bits of an undisturbed run. It takes root and
iproute2. The driver lives in namespaces of its own (network, mounts, processes), so that all ends with it.
"""
