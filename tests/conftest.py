"""What every test shares: eight fake CPU devices, few threads, a compilation cache, derandomised hypothesis.

The environment is set at import, before any test module can import jax; nothing here imports it.
"""

import os
from pathlib import Path

import hypothesis

ROOT = Path(__file__).resolve().parent.parent

os.environ["JAX_PLATFORMS"] = "cpu"
# Eight devices for the law "1 device == 8 devices"; one Eigen thread so that several test processes share two cores;
# LLVM's level 0, because nearly all of the suite's time is compiling (.6 of the CPU seconds; what XLA itself does to a
# program, fusion too, stays as it is). Another XLA_FLAGS in the environment is taken as it is.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8 --xla_cpu_multi_thread_eigen=false --xla_backend_optimization_level=0",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may need the network
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")

# derandomize: a red test is red again; deadline: the first example pays for a compilation.
hypothesis.settings.register_profile("wayfinder", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("wayfinder")
