"""Build logic shared by the PEP 517 backend (backend.py), `make dev` (dev.py) and `make wheel` (build_wheel.py). Never installed."""
