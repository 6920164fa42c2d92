"""The Kubernetes operator of VirtualFlow: keeps the worker pods of elastic training jobs, and tells the running
trainers who leaves and who has left.

From the middle outward: ``reconcile`` decides (pure), ``resources`` describes what is created (pure), ``controller``
carries decisions out, and ``handlers``, where kopf wakes it, is the edge.
"""
