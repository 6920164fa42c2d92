# Two images of one project, both non-root and made for a read-only root file system without capabilities:
#
#   docker build -t virtualflow-operator .                     operator and coordinator; knows nothing of torch
#   docker build -t virtualflow-trainer --target trainer .     workers: torch, scikit-learn and the examples
#
# Everything is installed from the locks in images/, which `make lock` writes: a file with another hash is refused. The
# trainer has torch with CUDA; --build-arg TORCH=cpu chooses the build for CPUs (x86_64). pip's own settings choose the
# index: --build-arg PIP_INDEX_URL=... for a mirror, --build-arg PIP_EXTRA_INDEX_URL=... for the one that has torch's
# builds for CPUs.
#
# Plain instructions only, so that engines without BuildKit can build it too; with those, each target costs what
# stands above it.

ARG BASE_IMAGE=python:3.11-slim-bookworm


# --- what both images run on ------------------------------------------------------------------------------------------

FROM ${BASE_IMAGE} AS runtime
# The root file system is read-only, so bytecode is written here, at build time, and never when a pod starts.
# The user has no entry in /etc/passwd: HOME and USER answer those who ask, under any other uid as well.
ENV PATH=/opt/virtualflow/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    USER=virtualflow
# A number, because runAsNonRoot cannot be checked against a name.
USER 65532:65532


# --- where both are built ---------------------------------------------------------------------------------------------

FROM ${BASE_IMAGE} AS build
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
# Hashes are asked for wherever pip installs from an index. Nothing is compiled from source but this project, which is
# pure Python.
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ONLY_BINARY=:all: \
    PIP_ROOT_USER_ACTION=ignore
WORKDIR /build
# Without pip: the base image's own installs into it.
RUN python -m venv --without-pip /opt/virtualflow


# The project itself, as a thin layer over either environment: its console scripts name the environment's python.
FROM build AS project
COPY images/build.txt ./
RUN python -m venv --without-pip tools \
 && pip --python tools/bin/python install --quiet --require-hashes -r build.txt
COPY pyproject.toml LICENSE README.md ./
COPY trainer trainer
COPY operator operator
RUN tools/bin/python -m hatchling build -t wheel -d dist \
 && pip --python /opt/virtualflow/bin/python install --quiet --no-compile --no-deps --no-index \
        --prefix /project dist/*.whl \
 && python -m compileall -q --invalidation-mode unchecked-hash -s /project -p /opt/virtualflow /project/lib


# --- the operator and the coordinator ---------------------------------------------------------------------------------

FROM build AS operator-dependencies
COPY images/operator.txt ./
# The operator speaks to the API server in plain dictionaries, through ApiClient. The generated API classes and models
# of the Kubernetes client (CoreV1Api, V1Pod and 1,800 more: 70 MB) are imported on demand only, and nobody here asks
# for them but kopf, for the metadata of an object. Of pygments' lexers, no bytecode: rich may ask for one of 500.
RUN pip --python /opt/virtualflow/bin/python install --quiet --no-compile --require-hashes -r operator.txt \
 && cd /opt/virtualflow/lib/python3.*/site-packages \
 && find kubernetes/client/api kubernetes/client/models kubernetes/aio/client/api kubernetes/aio/client/models \
        -name '*.py' ! -name __init__.py \
        ! -name v1_object_meta.py ! -name v1_owner_reference.py ! -name v1_managed_fields_entry.py -delete \
 && python -m compileall -q -j 0 --invalidation-mode unchecked-hash -x '/pygments/(lexers|styles|formatters)/' "$PWD"

FROM runtime AS operator
COPY --from=operator-dependencies /opt/virtualflow /opt/virtualflow
COPY --from=project /project /opt/virtualflow
# Whatever the operator imports is there.
RUN python -c 'import importlib, pkgutil, virtualflow.launcher.cli, virtualflow.coordinator.server, virtualflow_operator as package; \
[importlib.import_module(m.name) for m in pkgutil.walk_packages(package.__path__, "virtualflow_operator.") \
 if not m.name.endswith("__main__")]'
# The coordinator, health, metrics.
EXPOSE 7700 8080 8081
# Isolated (-I): no PYTHON* variable and no file of the working directory decides what runs.
ENTRYPOINT ["python", "-I", "-u", "-m", "virtualflow_operator"]
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="VirtualFlow operator" \
      org.opencontainers.image.description="Operator and coordinator of elastic PyTorch training over virtual nodes" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"


# --- the workers ------------------------------------------------------------------------------------------------------

FROM build AS trainer-dependencies
ARG TORCH=cuda
COPY images/trainer-${TORCH}.txt ./trainer.txt
# Tests of libraries, a sixth of the environment, stay behind; the import shows that nothing needs them. A few modules
# of torch are written for later Pythons and do not compile under this one.
RUN pip --python /opt/virtualflow/bin/python install --quiet --no-compile --require-hashes -r trainer.txt \
 && cd /opt/virtualflow/lib/python3.*/site-packages \
 && rm -rf torch/test torch/bin/test_* \
 && find numpy scipy sklearn sympy networkx -type d -name tests -prune -exec rm -r {} + \
 && { python -m compileall -qq -j 0 --invalidation-mode unchecked-hash "$PWD" || true; } \
 && /opt/virtualflow/bin/python -c 'import networkx, numpy.testing, safetensors.torch, scipy.stats, sklearn.datasets, \
sympy, torch._dynamo, torch.distributed, torch.utils.data'

FROM runtime AS trainer
WORKDIR /workspace
COPY --from=trainer-dependencies /opt/virtualflow /opt/virtualflow
COPY --from=project /project /opt/virtualflow
COPY examples examples
# Freed gradients are kept for the next virtual node, in huge pages (the GNU C library), as under `virtualflow run`.
ENV MALLOC_TRIM_THRESHOLD_=268435456 \
    MALLOC_MMAP_THRESHOLD_=33554432 \
    MALLOC_ARENA_MAX=1 \
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \
    CUBLAS_WORKSPACE_CONFIG=:4096:8
CMD ["python"]
ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="VirtualFlow trainer" \
      org.opencontainers.image.description="PyTorch, VirtualFlow and its examples: the workers of elastic training" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"


# What `docker build` without a target makes.
FROM operator
