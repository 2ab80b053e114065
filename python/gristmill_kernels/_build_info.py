"""Written by the build: what this installation of gristmill_kernels is."""

DISTRIBUTION = "kernels-cpu"
PLATFORM = "cpu"
VERSION = "0.1.0"
ARCHITECTURE = "x86_64"
ISA_LEVELS: tuple[str, ...] = ("avx2", "avx512", "avx512bf16", "amx", )
TORCH_TARGET = "2.10"
TORCH_BUILT_WITH = "2.13.0+cpu"
COMPILER = "GNU 12.2.0"
