"""One network trained three ways on real images: ``python -m syncbn_triton.demo``."""
