"""A training script as a package: python -m package_train.train, virtualflow run -m package_train.train."""
