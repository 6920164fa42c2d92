"""The edge: kopf's watches, the work-queue, and the controllers that carry decisions out."""
