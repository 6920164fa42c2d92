"""A campaign of faults against real jobs: what is cut off, slowed, stopped or broken is drawn from a seed.

``make campaign`` runs jobs of real processes in network namespaces of their own, and checks what each process has
written down about each step and each checkpoint: one lineage, one leader a step, no checkpoint by a writer that was
left behind, the bits of an undisturbed run. It takes root and iproute2. Each job lives in namespaces of its own
(network, mounts, processes), so that all ends with it, and several can run side by side.
"""
