"""The Kubernetes operator of VirtualFlow: keeps the worker pods of elastic training jobs, and tells the running
trainers who leaves and who has left.

From the middle outward: ``scheduling``, ``queues`` and ``jobs`` decide (pure), ``k8s`` talks to the API server, and
``controllers`` carry decisions out, woken by kopf's watches.
"""
